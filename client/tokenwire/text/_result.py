"""The whole answer to a prompt, as text."""

import msgspec

from tokenwire._results import Usage
from tokenwire._sequence import FinishReason


class TextResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a prompt; finish reason, stop reason, text and usage are those of vLLM's `/v1/chat/completions`."""

    request_id: str
    """The request's id."""
    text: str
    """The text, without the stop string unless `include_stop_str_in_output` asks for it."""
    token_ids: list[int]
    """The tokens: the stop token or EOS included, those after the one that completed a stop string not."""
    finish_reason: FinishReason
    """Why it ended; STOP at a stop string too."""
    stop_reason: str | int | None = None
    """The stop string or the stop token's id. None: EOS, or another finish reason."""
    usage: Usage
    """Token counts; the completion's are those of `token_ids`."""
    overrun_tokens: int | None = 0
    """Tokens that the engine had generated after the one that completed a stop string when the abort took effect. 0
    where no stop string matched. None: not known, since the abort was not confirmed. A step that runs at that moment
    may compute one or two more, which are nobody's."""
