"""Converts vLLM's outputs to the contract's messages: sequences, their ends, and the end of the request."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, RequestStateStats

from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2, logprobs_pb2, multiplex_pb2
from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server.conversion.logprobs import fill_columns, to_prompt_logprobs
from tokenwire_server.errors import RequestError

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.REPETITION: pb.FINISH_REASON_REPETITION,
}
_BY_NAME = {str(reason): reason for reason in FinishReason}


@dataclasses.dataclass(slots=True)
class SequenceEnd:
    """The end of a sequence."""

    reason: pb.FinishReason.ValueType
    stop_token_id: int | None = None
    weight_versions: Sequence[WeightVersionSpan] = ()
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None


@dataclasses.dataclass(slots=True)
class RequestEnd:
    """The end of a request: what its last output contains in addition to the sequences."""

    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache or fetched by a KV connector; None if not known."""
    timing: pb.Timing | None = None
    kv_transfer_params_json: str | None = None
    ec_transfer_params_json: str | None = None


@dataclasses.dataclass(slots=True)
class Chunk:
    """Output of a request since its previous chunk, as the contract's messages."""

    outputs: list[pb.SequenceOutput]
    request_end: RequestEnd | None = None
    """Set in the last chunk of the request only."""
    prompt_logprobs: logprobs_pb2.PromptLogprobs | None = None


def to_chunk(output: RequestOutput) -> Chunk:
    """Convert an output of vLLM's output processor.

    Returns:
        The output as the contract's messages.

    Raises:
        RequestError: REQUEST_FAILED, the engine ended the request with an error.

    """
    chunk = Chunk([_sequence(completion) for completion in output.outputs])
    if output.prompt_logprobs or output.prompt_token_id_logprobs is not None:
        chunk.prompt_logprobs = to_prompt_logprobs(output)
    if output.finished:
        chunk.request_end = to_request_end(
            output.metrics, output.num_cached_tokens, output.kv_transfer_params, output.ec_transfer_params
        )
    return chunk


def to_request_end(
    stats: RequestStateStats | None,
    cached_tokens: int | None,
    kv_transfer_params: dict[str, Any] | None,
    ec_transfer_params: dict[str, Any] | None,
) -> RequestEnd:
    """Convert the end of a request.

    Args:
        stats: vLLM's timestamps of the request; None if statistics are disabled.
        cached_tokens: prompt tokens found in the prefix cache or fetched by a KV connector; None if not known.
        kv_transfer_params: parameters from the KV connector.
        ec_transfer_params: parameters from the encoder-cache connector.

    Returns:
        The end of the request in the contract's terms.

    """
    return RequestEnd(
        cached_tokens,
        None if stats is None else _timing(stats),
        None if kv_transfer_params is None else json.dumps(kv_transfer_params),
        None if ec_transfer_params is None else json.dumps(ec_transfer_params),
    )


def to_sequence_end(
    reason: FinishReason,
    stop_reason: int | str | None,
    weight_versions: Sequence[WeightVersionSpan] | None,
    spec_decode_metrics: RequestSpecDecodeMetrics | None,
) -> SequenceEnd:
    """Convert the end of a sequence.

    Args:
        reason: vLLM's finish reason.
        stop_reason: the id of the stop token; None or one of vLLM's texts if no stop token ended the sequence.
        weight_versions: the spans of tokens sampled by each version of the weights; None if the engine does not report
            versions.
        spec_decode_metrics: counts of speculative decoding; None if it is not enabled.

    Returns:
        The end of the sequence in the contract's terms.

    Raises:
        RequestError: REQUEST_FAILED, the engine ended the request with an error.

    """
    if reason is FinishReason.ERROR:
        raise RequestError(
            Reason.REQUEST_FAILED, "the engine ended this request with an error; other requests continue"
        )
    return SequenceEnd(
        _FINISH_REASONS[reason],
        stop_reason if isinstance(stop_reason, int) else None,
        weight_versions or (),
        spec_decode_metrics,
    )


def fill_sequence_end(message: pb.SequenceOutput | multiplex_pb2.MultiplexFinish, sequence_end: SequenceEnd) -> None:
    """Set the end of a sequence in its message."""
    message.finish_reason = sequence_end.reason
    if sequence_end.stop_token_id is not None:
        message.stop_token_id = sequence_end.stop_token_id
    for span in sequence_end.weight_versions:
        message.weight_versions.add(version=span.version, start=span.start, end=span.end)
    if (metrics := sequence_end.spec_decode_metrics) is not None:
        # histogram[j] is the number of drafts of which j tokens were accepted.
        histogram = metrics.histogram
        message.speculative_decoding.num_drafts = sum(histogram)
        message.speculative_decoding.num_draft_tokens = metrics.num_draft_tokens
        message.speculative_decoding.num_accepted_tokens = sum(j * count for j, count in enumerate(histogram))


def fill_request_end(
    message: engine_service_pb2.GenerateResponse
    | engine_service_pb2.GenerateStreamResponse
    | multiplex_pb2.MultiplexFinish,
    request_end: RequestEnd,
    prompt_tokens: int,
    completion_tokens: int,
) -> None:
    """Set the end of a request in its last message.

    Args:
        message: the last message of the request.
        request_end: the end of the request.
        prompt_tokens: number of prompt tokens.
        completion_tokens: number of generated tokens, over all sequences.

    """
    message.usage.prompt_tokens = prompt_tokens
    message.usage.completion_tokens = completion_tokens
    # vLLM initializes the count to 0; the engine reports it with the first token.
    if request_end.cached_tokens is not None and completion_tokens:
        message.usage.cached_tokens = request_end.cached_tokens
    if request_end.timing is not None:
        message.timing.CopyFrom(request_end.timing)
    if request_end.kv_transfer_params_json is not None:
        message.kv_transfer_params_json = request_end.kv_transfer_params_json
    if request_end.ec_transfer_params_json is not None:
        message.ec_transfer_params_json = request_end.ec_transfer_params_json


def _sequence(completion: CompletionOutput) -> pb.SequenceOutput:
    message = pb.SequenceOutput(index=completion.index, token_ids=completion.token_ids)
    if completion.logprobs is not None:
        assert isinstance(completion.logprobs, FlatLogprobs)  # flat_logprobs is set for every request
        message.logprobs.SetInParent()
        message.logprobs.top_k = fill_columns(message.logprobs, completion.logprobs, 0)
        if completion.cumulative_logprob is not None:
            message.logprobs.cumulative_logprob = completion.cumulative_logprob
    if completion.sampling_mask is not None:
        # For each token, the ids that survived top-k, top-p and min-p.
        ids = completion.sampling_mask.token_ids
        message.sampling_mask.counts.extend(map(len, ids))
        message.sampling_mask.token_ids = b"".join(token.to_bytes(4, "little") for row in ids for token in row)
    if completion.finish_reason is not None:
        reason = _BY_NAME[completion.finish_reason]
        sequence_end = to_sequence_end(
            reason, completion.stop_reason, completion.weight_versions, completion.spec_decode_metrics
        )
        fill_sequence_end(message, sequence_end)
        if (experts := completion.routed_experts) is not None:
            # Shape [tokens, layers, experts per token].
            message.routed_experts.data = experts.tobytes()
            message.routed_experts.shape.extend(experts.shape)
            message.routed_experts.dtype = experts.dtype.name
    return message


def _timing(stats: RequestStateStats) -> pb.Timing | None:
    # In seconds. vLLM initializes its timestamps to 0.0, which means that the event has not occurred.
    timing = pb.Timing()
    if stats.scheduled_ts and stats.queued_ts:
        _set_seconds(timing.queue_time, stats.scheduled_ts - stats.queued_ts)
    if stats.first_token_latency:
        _set_seconds(timing.time_to_first_token, stats.first_token_latency)
        _set_seconds(timing.total_time, stats.first_token_latency + stats.last_token_ts - stats.first_token_ts)
    return timing if timing.ListFields() else None


def _set_seconds(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
