"""Log probabilities, in columns as on the wire: no object for each token."""

import msgspec

from tokenwire import _wire
from tokenwire.v1 import logprobs_pb2 as pb


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log probabilities of the tokens of a chunk, in columns.

    Where the chunk holds T tokens, `logprobs` and `ranks` have T values and the `top_` columns T x `top_k`, token by
    token, best first.
    """

    logprobs: list[float]
    """Log probability of each token itself."""
    ranks: list[int]
    """Rank of each token in the vocabulary; 1 is the most likely."""
    top_k: int = 0
    """Number of further ids reported for each token; 0 where only the token itself was asked for."""
    top_token_ids: list[int]
    """The `top_k` most likely ids for each token, or `SamplingParams.logprob_token_ids` in their order. The token itself
    is among the most likely ones where its rank is at most `top_k`."""
    top_logprobs: list[float]
    """Log probabilities of `top_token_ids`."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of the sequence's tokens up to this chunk's end. None: not known."""

    def top(self, position: int) -> list[tuple[int, float]]:
        """Give the further ids of the chunk's token at `position` with their log probabilities, best first."""
        return _row(self.top_k, self.top_token_ids, self.top_logprobs, range(len(self.logprobs))[position])

    @classmethod
    def from_proto(cls, message: pb.Logprobs) -> "Logprobs":
        """Convert the contract's message."""
        return cls(
            logprobs=list(message.logprobs),
            ranks=list(message.ranks),
            top_k=message.top_k,
            top_token_ids=list(message.top_token_ids),
            top_logprobs=list(message.top_logprobs),
            cumulative_logprob=_wire.present(message, "cumulative_logprob"),
        )


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log probabilities of prompt tokens, in columns laid out as in Logprobs."""

    offset: int
    """Position in the prompt of the first token of these columns; the first prompt token has no log probability."""
    logprobs: list[float]
    """Log probability of each prompt token given those before it."""
    ranks: list[int]
    """Rank of each prompt token in the vocabulary; 1 is the most likely."""
    top_k: int = 0
    """Number of further ids reported for each token; 0 where only the prompt token itself was asked for."""
    top_token_ids: list[int]
    """The `top_k` most likely ids at each position, best first."""
    top_logprobs: list[float]
    """Log probabilities of `top_token_ids`."""
    token_id_logprobs: list[float]
    """Scores of `SamplingParams.prompt_logprob_token_ids`, all rows one after the other. Empty unless that is set."""

    def top(self, position: int) -> list[tuple[int, float]]:
        """Give the further ids at the prompt's `position`, at least `offset`, with their log probabilities."""
        row = range(self.offset, self.offset + len(self.logprobs)).index(position)
        return _row(self.top_k, self.top_token_ids, self.top_logprobs, row)

    @classmethod
    def from_proto(cls, message: pb.PromptLogprobs) -> "PromptLogprobs":
        """Convert the contract's message."""
        return cls(
            offset=message.offset,
            logprobs=list(message.logprobs),
            ranks=list(message.ranks),
            top_k=message.top_k,
            top_token_ids=list(message.top_token_ids),
            top_logprobs=list(message.top_logprobs),
            token_id_logprobs=list(message.token_id_logprobs),
        )


def _row(k: int, ids: list[int], values: list[float], row: int) -> list[tuple[int, float]]:
    return list(zip(ids[row * k : (row + 1) * k], values[row * k : (row + 1) * k], strict=True))
