"""Turns the tokens of one sequence into the text to show: detokenization, then stop strings."""

from collections.abc import Sequence

from tokenwire.text._detokenizer import Detokenizer
from tokenwire.text._stop_matcher import StopMatcher


class TextAssembler:
    """Assembles the text of a sequence as vLLM does, independent of the chunks in which the tokens arrive.

    A stop string only matches if it ends in the text of a token after the first `min_tokens`. The text of a stop token
    is included only with `include_stop_str_in_output`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
    ) -> None:
        """Make the assembler of one sequence.

        Args:
            detokenizer: the sequence's detokenizer.
            stop: the stop strings, none of them empty.
            min_tokens: number of tokens before a stop string may match.
            include_stop_str_in_output: whether the text includes the stop string, and the text of a stop token.

        """
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, include=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self.token_ids: list[int] = []
        """The sequence's tokens, up to and including the one that completed the stop string."""
        self.overrun_tokens = 0
        """Number of tokens that arrived after it."""

    @property
    def matched(self) -> str | None:
        """The stop string that matched; None if none has."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """Add tokens and return the text to show. `ends_with_stop_token`: the last token is a stop token or EOS."""
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
        """Return the rest of the text. An incomplete character at the end is dropped, as in vLLM."""
        return self._matcher.flush()
