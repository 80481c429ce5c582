"""From vLLM's outputs to the contract's messages."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, RequestStateStats
from vllm.v1.outputs import LogprobsLists

from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2, logprobs_pb2, multiplex_pb2
from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server.errors import RequestError

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.REPETITION: pb.FINISH_REASON_REPETITION,
}
_BY_NAME = {str(reason): reason for reason in FinishReason}


@dataclasses.dataclass(slots=True)
class Ending:
    """How a sequence ended."""

    reason: pb.FinishReason.ValueType
    stop_token_id: int | None = None
    weight_versions: Sequence[WeightVersionSpan] = ()
    speculation: RequestSpecDecodeMetrics | None = None


@dataclasses.dataclass(slots=True)
class Closing:
    """What a request's last output tells beside its sequences."""

    cached_tokens: int | None = None
    timing: pb.Timing | None = None
    kv_transfer_params_json: str | None = None
    ec_transfer_params_json: str | None = None


@dataclasses.dataclass(slots=True)
class Chunk:
    """What a request got from the engine since the last time, in the contract's terms."""

    outputs: list[pb.SequenceOutput]
    closing: Closing | None = None
    """With the last output only: nothing follows."""
    prompt_logprobs: logprobs_pb2.PromptLogprobs | None = None


def to_chunk(output: RequestOutput) -> Chunk:
    """Convert an output of the engine's ordinary path.

    Raises:
        RequestError: the engine ended the request with an error, REQUEST_FAILED.

    """
    chunk = Chunk([_sequence(completion) for completion in output.outputs])
    if output.prompt_logprobs or output.prompt_token_id_logprobs is not None:
        chunk.prompt_logprobs = _prompt_logprobs(output)
    if output.finished:
        chunk.closing = to_closing(
            output.metrics, output.num_cached_tokens, output.kv_transfer_params, output.ec_transfer_params
        )
    return chunk


def to_closing(
    stats: RequestStateStats | None,
    cached_tokens: int | None,
    kv_transfer_params: dict[str, Any] | None,
    ec_transfer_params: dict[str, Any] | None,
) -> Closing:
    """Convert what a request's last output tells beside its sequences."""
    return Closing(
        cached_tokens,
        None if stats is None else _timing(stats),
        None if kv_transfer_params is None else json.dumps(kv_transfer_params),
        None if ec_transfer_params is None else json.dumps(ec_transfer_params),
    )


def to_ending(
    reason: FinishReason,
    stop_reason: int | str | None,
    weight_versions: Sequence[WeightVersionSpan] | None,
    speculation: RequestSpecDecodeMetrics | None,
) -> Ending:
    """Convert the end of a sequence.

    Raises:
        RequestError: the engine ended the request with an error, REQUEST_FAILED.

    """
    if reason is FinishReason.ERROR:
        raise RequestError(Reason.REQUEST_FAILED, "the engine ended this request with an error; others go on")
    return Ending(
        _FINISH_REASONS[reason],
        stop_reason if isinstance(stop_reason, int) else None,
        weight_versions or (),
        speculation,
    )


def fill_ending(message: pb.SequenceOutput | multiplex_pb2.MultiplexFinish, ending: Ending) -> None:
    """Write the end of a sequence into its message."""
    message.finish_reason = ending.reason
    if ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    for span in ending.weight_versions:
        message.weight_versions.add(version=span.version, start=span.start, end=span.end)
    if ending.speculation is not None:
        # The histogram counts drafts by the number of tokens accepted.
        histogram = ending.speculation.histogram
        message.speculative_decoding.num_drafts = sum(histogram)
        message.speculative_decoding.num_draft_tokens = ending.speculation.num_draft_tokens
        message.speculative_decoding.num_accepted_tokens = sum(j * count for j, count in enumerate(histogram))


def fill_closing(
    message: engine_service_pb2.GenerateResponse
    | engine_service_pb2.GenerateStreamResponse
    | multiplex_pb2.MultiplexFinish,
    closing: Closing,
    prompt_tokens: int,
    completion_tokens: int,
) -> None:
    """Write what a request's last output tells beside its sequences into its last message."""
    message.usage.prompt_tokens = prompt_tokens
    message.usage.completion_tokens = completion_tokens
    # Before a request's first token the engine has not told, and vLLM's count is a mere 0.
    if closing.cached_tokens is not None and completion_tokens:
        message.usage.cached_tokens = closing.cached_tokens
    if closing.timing is not None:
        message.timing.CopyFrom(closing.timing)
    if closing.kv_transfer_params_json is not None:
        message.kv_transfer_params_json = closing.kv_transfer_params_json
    if closing.ec_transfer_params_json is not None:
        message.ec_transfer_params_json = closing.ec_transfer_params_json


class LogprobColumns:
    """Log probabilities of tokens, one after the other, as the contract lays them out."""

    __slots__ = ("logprobs", "ranks", "top_logprobs", "top_token_ids")

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.top_token_ids: list[int] = []
        self.top_logprobs: list[float] = []

    def __len__(self) -> int:
        """Return the number of values held."""
        return 2 * (len(self.logprobs) + len(self.top_logprobs))

    def add(self, lists: LogprobsLists, top_k: int) -> tuple[float, int]:
        """Append the engine's arrays for one output.

        Args:
            lists: arrays of shape [tokens, columns], the sampled token first; the engine pads the columns to the widest
                request of its batch.
            top_k: number of further ids asked for; -1 means all columns.

        Returns:
            The sum of the sampled tokens' log probabilities, and the number of further ids of each token.

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


def _sequence(completion: CompletionOutput) -> pb.SequenceOutput:
    message = pb.SequenceOutput(index=completion.index, token_ids=completion.token_ids)
    if completion.logprobs is not None:
        assert isinstance(completion.logprobs, FlatLogprobs)  # asked for in every request
        message.logprobs.SetInParent()
        message.logprobs.top_k = _fill_columns(message.logprobs, completion.logprobs, 0)
        if completion.cumulative_logprob is not None:
            message.logprobs.cumulative_logprob = completion.cumulative_logprob
    if completion.sampling_mask is not None:
        ids = completion.sampling_mask.token_ids
        message.sampling_mask.counts.extend(map(len, ids))
        message.sampling_mask.token_ids = b"".join(token.to_bytes(4, "little") for row in ids for token in row)
    if completion.finish_reason is not None:
        reason = _BY_NAME[completion.finish_reason]
        ending = to_ending(reason, completion.stop_reason, completion.weight_versions, completion.spec_decode_metrics)
        fill_ending(message, ending)
        if (experts := completion.routed_experts) is not None:
            message.routed_experts.data = experts.tobytes()
            message.routed_experts.shape.extend(experts.shape)
            message.routed_experts.dtype = experts.dtype.name
    return message


def _prompt_logprobs(output: RequestOutput) -> logprobs_pb2.PromptLogprobs:
    message = logprobs_pb2.PromptLogprobs(offset=1)
    if output.prompt_logprobs:
        assert isinstance(output.prompt_logprobs, FlatLogprobs)  # asked for in every request
        # The first prompt token has no value: vLLM gives it an empty place.
        message.top_k = _fill_columns(message, output.prompt_logprobs, 1)
    if output.prompt_token_id_logprobs is not None:
        message.token_id_logprobs.extend(output.prompt_token_id_logprobs.ravel().tolist())
    return message


def _fill_columns(
    message: logprobs_pb2.Logprobs | logprobs_pb2.PromptLogprobs, values: FlatLogprobs, first: int
) -> int:
    """Fill the columns from position `first` on and return k; the token itself comes first in vLLM's flat form."""
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
        # Deleting every width-th value leaves the k further ones of each token.
        del logprobs[::width], ids[::width]
        message.top_logprobs.extend(logprobs)
        message.top_token_ids.extend(ids)
    return width - 1


def _fill_merged_columns(
    message: logprobs_pb2.Logprobs | logprobs_pb2.PromptLogprobs, values: FlatLogprobs, first: int, width: int
) -> None:
    # When vLLM merges outputs, a token that is among its own k most likely stands once, not twice, and its rank says
    # where it was among them.
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


def _timing(stats: RequestStateStats) -> pb.Timing | None:
    # Timestamps of vLLM that are still 0.0 mean "has not happened".
    timing = pb.Timing()
    if stats.scheduled_ts and stats.queued_ts:
        _set(timing.queue_time, stats.scheduled_ts - stats.queued_ts)
    if stats.first_token_latency:
        _set(timing.time_to_first_token, stats.first_token_latency)
        _set(timing.total_time, stats.first_token_latency + stats.last_token_ts - stats.first_token_ts)
    return timing if timing.ListFields() else None


def _set(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
