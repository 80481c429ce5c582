"""The output of one sequence, which every generating RPC returns in the same form."""

import struct
from enum import StrEnum
from typing import Any

import msgspec

from tokenwire._logprobs import Logprobs
from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1.multiplex_pb2 import MultiplexFinish


class FinishReason(StrEnum):
    """Why a sequence finished."""

    STOP = "stop"
    """EOS, or the token in `stop_token_id`."""
    LENGTH = "length"
    """max_tokens, or the maximum length of the model's context."""
    ABORT = "abort"
    """The request was aborted, by its caller or at the end of a drain."""
    REPETITION = "repetition"
    """`SamplingParams.repetition_detection` detected a repetition."""
    TIME_LIMIT = "time_limit"
    """max_time has passed."""
    UNKNOWN = "unknown"
    """The server is newer than this client and returned a reason that the client does not know."""

    @classmethod
    def from_proto(cls, value: int) -> "FinishReason | None":
        """Convert from the protobuf value. None: the sequence has not finished."""
        return _FINISH_REASONS.get(value, cls.UNKNOWN)


_FINISH_REASONS: dict[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
    pb.FINISH_REASON_REPETITION: FinishReason.REPETITION,
    pb.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
}


class SamplingMask(msgspec.Struct, frozen=True, gc=False):
    """Token ids left to sample from after top-k, top-p and min-p, for each of the T tokens of a chunk. uint32."""

    counts: list[int]
    """Number of ids left for each token. Shape [T]."""
    token_ids: list[int]
    """The ids of all tokens, concatenated. Shape [sum of counts]."""

    @classmethod
    def from_proto(cls, message: pb.SamplingMask) -> "SamplingMask":
        """Convert from the protobuf message. Raises ValueError if its columns do not match."""
        if len(message.token_ids) != 4 * sum(message.counts):
            raise ValueError("a sampling mask has other token ids than its counts")
        ids = struct.unpack(f"<{len(message.token_ids) // 4}I", message.token_ids)
        return cls(list(message.counts), list(ids))


class RoutedExperts(msgspec.Struct, frozen=True, gc=False):
    """Expert routing, as an array of shape [tokens, layers, experts per token].

    On a little-endian machine, `numpy.frombuffer(routed.data, routed.dtype).reshape(routed.shape)` is the array.
    """

    data: bytes
    """The array's bytes, in C order and little-endian."""
    shape: tuple[int, ...]
    """The array's shape."""
    dtype: str
    """The array's data type in NumPy's notation, "uint8" for example."""

    @classmethod
    def from_proto(cls, message: pb.RoutedExperts) -> "RoutedExperts":
        """Convert from the protobuf message."""
        return cls(message.data, tuple(message.shape), message.dtype)


class WeightVersionSpan(msgspec.Struct, frozen=True, gc=False):
    """A range of output tokens that were sampled with one version of the weights."""

    version: str
    """Label of the version."""
    start: int
    """Index of the first token in the sequence's output, from 0."""
    end: int
    """Index after the last token."""

    @classmethod
    def from_proto(cls, message: pb.WeightVersionSpan) -> "WeightVersionSpan":
        """Convert from the protobuf message."""
        return cls(message.version, message.start, message.end)


class SpeculativeDecoding(msgspec.Struct, frozen=True, gc=False):
    """Speculative decoding counts of a sequence."""

    num_drafts: int
    """Number of drafts."""
    num_draft_tokens: int
    """Number of draft tokens."""
    num_accepted_tokens: int
    """Number of accepted draft tokens."""

    @classmethod
    def from_proto(cls, message: pb.SpeculativeDecoding) -> "SpeculativeDecoding":
        """Convert from the protobuf message."""
        return cls(message.num_drafts, message.num_draft_tokens, message.num_accepted_tokens)


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Output of one sequence: all of it in a result, the new part in a delta."""

    index: int
    """Index of the sequence, 0 to n - 1."""
    token_ids: list[int]
    """The tokens, including stop tokens and EOS. May be empty in the delta with the finish."""
    finish_reason: FinishReason | None = None
    """Why the sequence finished; nothing follows for this index. None: it has not finished."""
    stop_token_id: int | None = None
    """The stop token that ended the sequence, or an EOS id of the model other than the tokenizer's. None: the
    tokenizer's EOS or something else ended it."""
    logprobs: Logprobs | None = None
    """Log probabilities of exactly these tokens. None: not requested."""
    sampling_mask: SamplingMask | None = None
    """Token ids left to sample from, for each token. None: the engine does not return sampling masks."""
    routed_experts: RoutedExperts | None = None
    """Experts that each token was routed to, with the finish. None: the engine does not return expert routing."""
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    """Version of the weights that sampled each range of tokens, with the finish. Empty: the weights have no labels."""
    speculative_decoding: SpeculativeDecoding | None = None
    """Speculative decoding counts, with the finish. None: not reported by the engine."""

    @classmethod
    def from_proto(cls, message: pb.SequenceOutput) -> "SequenceOutput":
        """Convert from the protobuf message."""
        logprobs = Logprobs.from_proto(message.logprobs) if message.HasField("logprobs") else None
        # Most messages of a stream have only tokens and log probabilities.
        if not message.finish_reason and not message.HasField("sampling_mask"):
            return cls(index=message.index, token_ids=list(message.token_ids), logprobs=logprobs)
        return cls(index=message.index, token_ids=list(message.token_ids), logprobs=logprobs, **sequence_end(message))


def sequence_end(message: pb.SequenceOutput | MultiplexFinish) -> dict[str, Any]:
    """Convert the fields of a sequence's end, which SequenceOutput shares with MultiplexFinish, without absent ones."""
    has = message.HasField
    fields: dict[str, Any] = {}
    if message.finish_reason:
        fields["finish_reason"] = FinishReason.from_proto(message.finish_reason)
    if has("stop_token_id"):
        fields["stop_token_id"] = message.stop_token_id
    if has("sampling_mask"):
        fields["sampling_mask"] = SamplingMask.from_proto(message.sampling_mask)
    if has("routed_experts"):
        fields["routed_experts"] = RoutedExperts.from_proto(message.routed_experts)
    if message.weight_versions:
        fields["weight_versions"] = tuple(map(WeightVersionSpan.from_proto, message.weight_versions))
    if has("speculative_decoding"):
        fields["speculative_decoding"] = SpeculativeDecoding.from_proto(message.speculative_decoding)
    return fields
