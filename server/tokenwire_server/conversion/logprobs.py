"""From vLLM's log probabilities to the contract's columns.

A column has one value per token (`logprobs`, `ranks`) or k values per token (`top_token_ids`, `top_logprobs`), where k is
the number of top tokens reported for each token.
"""

from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.v1.outputs import LogprobsLists

from tokenwire.v1 import logprobs_pb2


class LogprobColumns:
    """Log probabilities of consecutive tokens, in the contract's columns."""

    __slots__ = ("logprobs", "ranks", "top_logprobs", "top_token_ids")

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.top_token_ids: list[int] = []
        self.top_logprobs: list[float] = []

    def __len__(self) -> int:
        """Return the number of values in all columns."""
        return 2 * (len(self.logprobs) + len(self.top_logprobs))

    def add(self, lists: LogprobsLists, top_k: int) -> tuple[float, int]:
        """Append the log probabilities of one engine output.

        Args:
            lists: the engine's arrays: int32 token ids and float32 log probabilities of shape [tokens, columns], and
                int32 ranks of shape [tokens]. Column 0 is the sampled token. The engine pads the columns to the largest
                number that a request of the batch asked for.
            top_k: number of top tokens that this request asked for; -1 means all columns.

        Returns:
            The sum of the sampled tokens' log probabilities, and the number of top tokens per token.

        """
        token_ids, logprobs, ranks, _ = lists
        end = logprobs.shape[1] if top_k < 0 else top_k + 1
        self.ranks.extend(ranks.tolist())
        total = 0.0
        for id_row, row in zip(token_ids.tolist(), logprobs.tolist(), strict=True):
            total += row[0]
            self.logprobs.append(row[0])
            if end > 1:
                self.top_logprobs += row[1:end]
                self.top_token_ids += id_row[1:end]
        return total, end - 1


def to_prompt_logprobs(output: RequestOutput) -> logprobs_pb2.PromptLogprobs:
    """Return the prompt log probabilities of an output, from the second prompt token on."""
    message = logprobs_pb2.PromptLogprobs(offset=1)
    if output.prompt_logprobs:
        assert isinstance(output.prompt_logprobs, FlatLogprobs)  # flat_logprobs is set for every request
        # vLLM has an empty position for the first prompt token, which has no log probability.
        message.top_k = fill_columns(message, output.prompt_logprobs, 1)
    if output.prompt_token_id_logprobs is not None:
        # float32 of shape [scored positions, ids]; the contract has the rows one after the other.
        message.token_id_logprobs.extend(output.prompt_token_id_logprobs.ravel().tolist())
    return message


def fill_columns(message: logprobs_pb2.Logprobs | logprobs_pb2.PromptLogprobs, values: FlatLogprobs, first: int) -> int:
    """Append vLLM's flat log probabilities to the columns of a message.

    Args:
        message: the message with the columns.
        values: per position the token itself, followed by its top tokens.
        first: index of the first position to append.

    Returns:
        The number of top tokens per token.

    """
    starts = values.start_indices[first:]
    if not starts:
        return 0
    width: int = values.end_indices[first] - starts[0]
    begin, end = starts[0], values.end_indices[-1]
    if end - begin < width * len(starts):
        _fill_merged_columns(message, values, first, width)
        return width - 1
    logprobs, ids = values.logprobs[begin:end], values.token_ids[begin:end]
    message.logprobs.extend(logprobs[::width])
    message.ranks.extend(values.ranks[begin:end:width])
    if width > 1:
        # Without every width-th value, the top tokens of all positions are left.
        del logprobs[::width], ids[::width]
        message.top_logprobs.extend(logprobs)
        message.top_token_ids.extend(ids)
    return width - 1


def _fill_merged_columns(
    message: logprobs_pb2.Logprobs | logprobs_pb2.PromptLogprobs, values: FlatLogprobs, first: int, width: int
) -> None:
    # When vLLM merges outputs, a token that is among its own top tokens is listed once instead of twice; its rank is its
    # place among them.
    for begin, end in zip(values.start_indices[first:], values.end_indices[first:], strict=True):
        logprob, rank, token_id = values.logprobs[begin], values.ranks[begin], values.token_ids[begin]
        logprobs, ids = values.logprobs[begin + 1 : end], values.token_ids[begin + 1 : end]
        if end - begin < width:
            logprobs.insert(rank - 1, logprob)
            ids.insert(rank - 1, token_id)
        message.logprobs.append(logprob)
        message.ranks.append(rank)
        message.top_logprobs.extend(logprobs)
        message.top_token_ids.extend(ids)
