"""Log probabilities, in columns as on the wire: there is no object per token."""

import msgspec

from tokenwire import _wire
from tokenwire.v1 import logprobs_pb2 as pb


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log probabilities of a chunk of T tokens, in columns.

    Log probabilities are natural logarithms, float32 on the wire. Token ids and ranks are uint32.
    """

    logprobs: list[float]
    """Log probability of each token. Shape [T]."""
    ranks: list[int]
    """Rank of each token in the vocabulary; 1 is the most likely. Shape [T]."""
    top_k: int = 0
    """Number k of most likely tokens reported per position. 0: only the token itself."""
    top_token_ids: list[int]
    """The `top_k` most likely token ids at each position, the most likely first, or `SamplingParams.logprob_token_ids`
    in their order. Includes the token itself if its rank is at most `top_k`. Shape [T, top_k], flattened."""
    top_logprobs: list[float]
    """Log probabilities of `top_token_ids`. Shape [T, top_k], flattened."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of the sequence's tokens up to the end of this chunk. None: unknown."""

    def top(self, position: int) -> list[tuple[int, float]]:
        """Return the `top_k` tokens at `position` in the chunk, as pairs of token id and log probability."""
        return _row(self.top_k, self.top_token_ids, self.top_logprobs, range(len(self.logprobs))[position])

    @classmethod
    def from_proto(cls, message: pb.Logprobs) -> "Logprobs":
        """Convert from the protobuf message."""
        return cls(
            logprobs=list(message.logprobs),
            ranks=list(message.ranks),
            top_k=message.top_k,
            top_token_ids=list(message.top_token_ids),
            top_logprobs=list(message.top_logprobs),
            cumulative_logprob=_wire.present(message, "cumulative_logprob"),
        )


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log probabilities of T prompt tokens, in columns laid out as in Logprobs."""

    offset: int
    """Position in the prompt of the first of these tokens, at least 1: the first prompt token has no log
    probability."""
    logprobs: list[float]
    """Log probability of each prompt token given the tokens before it. Shape [T]."""
    ranks: list[int]
    """Rank of each prompt token in the vocabulary; 1 is the most likely. Shape [T]."""
    top_k: int = 0
    """Number k of most likely tokens reported per position. 0: only the prompt token itself."""
    top_token_ids: list[int]
    """The `top_k` most likely token ids at each position, the most likely first. Shape [T, top_k], flattened."""
    top_logprobs: list[float]
    """Log probabilities of `top_token_ids`. Shape [T, top_k], flattened."""
    token_id_logprobs: list[float]
    """Log probabilities of `SamplingParams.prompt_logprob_token_ids`, the rows concatenated. Empty unless that is
    set."""

    def top(self, position: int) -> list[tuple[int, float]]:
        """Return the `top_k` tokens at `position` in the prompt, as pairs of token id and log probability."""
        row = range(self.offset, self.offset + len(self.logprobs)).index(position)
        return _row(self.top_k, self.top_token_ids, self.top_logprobs, row)

    @classmethod
    def from_proto(cls, message: pb.PromptLogprobs) -> "PromptLogprobs":
        """Convert from the protobuf message."""
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
