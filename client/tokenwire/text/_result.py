"""The result of a text request."""

import msgspec

from tokenwire._results import Usage
from tokenwire._sequence import FinishReason


class TextResult(msgspec.Struct, frozen=True, kw_only=True):
    """The completion of a prompt. Text, finish reason, stop reason and usage equal vLLM's `/v1/chat/completions`."""

    request_id: str
    """The request's id."""
    text: str
    """The text, without the stop string unless `include_stop_str_in_output` is set."""
    token_ids: list[int]
    """The tokens, including a stop token or EOS. Ends with the token that completed a stop string."""
    finish_reason: FinishReason
    """Why the text ended. STOP for a stop string too."""
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token. None: EOS, or another finish reason."""
    usage: Usage
    """Token counts. `completion_tokens` counts `token_ids`."""
    overrun_tokens: int | None = 0
    """Number of tokens that the engine generated after the one that completed a stop string, until the abort took
    effect. The engine step that is running at that time may compute one or two more that are discarded. 0: no stop
    string matched. None: unknown, since the abort was not confirmed."""
