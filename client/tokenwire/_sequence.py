"""What one output sequence got: the part of an answer that every RPC shares."""

import struct
from enum import StrEnum
from typing import Any

import msgspec

from tokenwire._logprobs import Logprobs
from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1.multiplex_pb2 import MultiplexFinish


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """EOS, or the token in `stop_token_id`."""
    LENGTH = "length"
    """max_tokens, or the end of the model's context."""
    ABORT = "abort"
    """Abort, by any of the ways to ask for it, or the end of a drain."""
    REPETITION = "repetition"
    """`SamplingParams.repetition_detection` found a repetition."""
    TIME_LIMIT = "time_limit"
    """max_time was over."""
    UNKNOWN = "unknown"
    """A reason that a later server has and this client does not know; the sequence has ended."""

    @classmethod
    def from_proto(cls, value: int) -> "FinishReason | None":
        """Convert the contract's value; None while the sequence runs."""
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
    """Token ids that survived top-k, top-p and min-p, for each token of a chunk."""

    counts: list[int]
    """Number of surviving ids for each token."""
    token_ids: list[int]
    """The ids, one token's after the other's."""

    @classmethod
    def from_proto(cls, message: pb.SamplingMask) -> "SamplingMask":
        """Convert the contract's message."""
        ids = struct.unpack(f"<{len(message.token_ids) // 4}I", message.token_ids)
        return cls(list(message.counts), list(ids))


class RoutedExperts(msgspec.Struct, frozen=True, gc=False):
    """Expert routing, an array of shape [tokens, layers, experts per token].

    `numpy.frombuffer(routed.data, routed.dtype).reshape(routed.shape)` gives it on a little-endian machine.
    """

    data: bytes
    """The array in C order, little-endian."""
    shape: tuple[int, ...]
    """The array's shape."""
    dtype: str
    """The array's element type in NumPy's notation, "uint8" for example."""

    @classmethod
    def from_proto(cls, message: pb.RoutedExperts) -> "RoutedExperts":
        """Convert the contract's message."""
        return cls(message.data, tuple(message.shape), message.dtype)


class WeightVersionSpan(msgspec.Struct, frozen=True, gc=False):
    """A run of output tokens sampled by one version of the weights."""

    version: str
    """The version's label."""
    start: int
    """First token, from 0."""
    end: int
    """One past the last token."""

    @classmethod
    def from_proto(cls, message: pb.WeightVersionSpan) -> "WeightVersionSpan":
        """Convert the contract's message."""
        return cls(message.version, message.start, message.end)


class SpeculativeDecoding(msgspec.Struct, frozen=True, gc=False):
    """What speculative decoding did for a sequence."""

    num_drafts: int
    """Number of drafts."""
    num_draft_tokens: int
    """Number of tokens drafted."""
    num_accepted_tokens: int
    """Number of drafted tokens accepted."""

    @classmethod
    def from_proto(cls, message: pb.SpeculativeDecoding) -> "SpeculativeDecoding":
        """Convert the contract's message."""
        return cls(message.num_drafts, message.num_draft_tokens, message.num_accepted_tokens)


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one output sequence got: all of it in a result, the tokens since the last one in a delta."""

    index: int
    """Which of the n sequences, from 0."""
    token_ids: list[int]
    """The new tokens, stop tokens and EOS included. May be empty with the finish."""
    finish_reason: FinishReason | None = None
    """Why the sequence ended; nothing follows for this index. None while it runs."""
    stop_token_id: int | None = None
    """The stop token, or one of the model's further EOS ids, that ended the sequence. None: the tokenizer's own EOS or
    something else ended it."""
    logprobs: Logprobs | None = None
    """Log probabilities of exactly these tokens. None: not asked for."""
    sampling_mask: SamplingMask | None = None
    """The token ids that sampling could have chosen. None: the engine does not return them."""
    routed_experts: RoutedExperts | None = None
    """The experts that each token was routed to, with the finish. None: the engine does not return them."""
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    """Which weights sampled which tokens, with the finish. Empty: the engine does not label its weights."""
    speculative_decoding: SpeculativeDecoding | None = None
    """Counts of speculative decoding, with the finish. None: the engine does not report them."""

    @classmethod
    def from_proto(cls, message: pb.SequenceOutput) -> "SequenceOutput":
        """Convert the contract's message."""
        logprobs = Logprobs.from_proto(message.logprobs) if message.HasField("logprobs") else None
        # Most messages of a stream have only tokens.
        if not message.finish_reason and not message.HasField("sampling_mask"):
            return cls(index=message.index, token_ids=list(message.token_ids), logprobs=logprobs)
        return cls(index=message.index, token_ids=list(message.token_ids), logprobs=logprobs, **sequence_end(message))


def sequence_end(message: pb.SequenceOutput | MultiplexFinish) -> dict[str, Any]:
    """Convert the fields of a sequence's end, which SequenceOutput and MultiplexFinish share. Absent ones are left out."""
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
