"""From the tokens of one sequence to the text that its reader sees: detokenization, then stop strings."""

from collections.abc import Sequence

from tokenwire.text._detokenizer import Detokenizer
from tokenwire.text._stop_matcher import StopMatcher


class TextAssembler:
    """Makes the text of a sequence, as vLLM makes it, whatever the chunks that the tokens come in.

    A stop string counts once more than `min_tokens` tokens are there, and if it ends in the text of such a token. The
    stop token's own text is part of the text only with `include_stop_str_in_output`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, include=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self.token_ids: list[int] = []
        """The sequence's tokens, up to the one that completed the stop string."""
        self.overrun_tokens = 0
        """Number of tokens that came after it."""

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None so far."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """Take the next tokens and give the text that can be shown. `ends_with_stop_token`: EOS included."""
        pieces = []
        for position, token_id in enumerate(token_ids, 1):
            if self.matched is not None:
                self.overrun_tokens += len(token_ids) - position + 1
                break
            self.token_ids.append(token_id)
            if ends_with_stop_token and position == len(token_ids) and not self._include_stop:
                break
            text = self._detokenizer.push(token_id)
            if text:
                pieces.append(self._matcher.push(text, may_stop=len(self.token_ids) > self._min_tokens))
        return "".join(pieces)

    def finish(self) -> str:
        """Give the rest of the text. Half a character at its end is dropped, as in vLLM."""
        return self._matcher.flush()
