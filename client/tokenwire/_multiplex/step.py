"""One message of a Multiplex stream, in columns as on the wire: there is no object per token."""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TypeVar

import msgspec

from tokenwire import _wire
from tokenwire._contract import Reason
from tokenwire._errors import StatusError
from tokenwire._logprobs import Logprobs, PromptLogprobs
from tokenwire._results import Timing, Usage, request_end
from tokenwire._sequence import (
    FinishReason,
    RoutedExperts,
    SamplingMask,
    SpeculativeDecoding,
    WeightVersionSpan,
    sequence_end,
)
from tokenwire._status import error_from_status
from tokenwire.v1 import multiplex_pb2 as pb

_Message = TypeVar("_Message")
_T = TypeVar("_T")


class MultiplexLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log probabilities of E entries of a step, T tokens together, in columns laid out as in Logprobs."""

    entries: list[int]
    """Positions of these entries in the step's columns, ascending. Shape [E]. Empty: all entries of the step."""
    top_ks: list[int]
    """Number k of most likely tokens reported per position, of each entry. Shape [E]."""
    logprobs: list[float]
    """Log probability of each token, entry by entry. Shape [T]."""
    ranks: list[int]
    """Rank of each token in the vocabulary; 1 is the most likely. Shape [T]."""
    top_token_ids: list[int]
    """The k most likely token ids at each position, flattened. Shape [sum of k over the T tokens]."""
    top_logprobs: list[float]
    """Log probabilities of `top_token_ids`, in the same shape."""

    @classmethod
    def from_proto(cls, message: pb.MultiplexLogprobs, num_entries: int) -> "MultiplexLogprobs":
        """Convert from the message of a step with `num_entries` entries. Raises ValueError if columns do not match."""
        entries, top_ks = message.entries[:], message.top_ks[:]
        fits = (
            len(top_ks) == (len(entries) or num_entries)
            and (not entries or entries[-1] < num_entries)
            and len(message.logprobs) == len(message.ranks)
            and len(message.top_token_ids) == len(message.top_logprobs)
        )
        if not fits:
            raise ValueError("columns of log probabilities have different lengths")
        return cls(
            entries=entries,
            top_ks=top_ks,
            logprobs=message.logprobs[:],
            ranks=message.ranks[:],
            top_token_ids=message.top_token_ids[:],
            top_logprobs=message.top_logprobs[:],
        )


class MultiplexFinish(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The finish of a sequence."""

    handle: int
    """The request's handle."""
    index: int
    """Index of the sequence, 0 to n - 1."""
    finish_reason: FinishReason
    """Why the sequence finished."""
    stop_token_id: int | None = None
    """As in SequenceOutput."""
    last: bool
    """Whether this is the request's last sequence to finish. The handle is reused after this step."""
    usage: Usage | None = None
    """Token counts. None: not the request's last sequence."""
    timing: Timing | None = None
    """Durations. None: not reported by the engine, or not the request's last sequence."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of the sequence's tokens. None: not requested."""
    kv_transfer_params_json: str | None = None
    """Parameters from the engine's KV connector: JSON, unchanged. None: no parameters, or not the request's last
    sequence."""
    ec_transfer_params_json: str | None = None
    """Parameters from the engine's encoder-cache connector: JSON, unchanged. None: no parameters, or not the request's
    last sequence."""
    sampling_mask: SamplingMask | None = None
    """Token ids left to sample from, for each token of the sequence. None: the engine does not return sampling
    masks."""
    routed_experts: RoutedExperts | None = None
    """As in SequenceOutput."""
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    """As in SequenceOutput."""
    speculative_decoding: SpeculativeDecoding | None = None
    """As in SequenceOutput."""

    @classmethod
    def from_proto(cls, message: pb.MultiplexFinish) -> "MultiplexFinish":
        """Convert from the protobuf message."""
        end = sequence_end(message)
        end.setdefault("finish_reason", FinishReason.UNKNOWN)
        return cls(
            handle=message.handle,
            index=message.index,
            last=message.last,
            cumulative_logprob=_wire.present(message, "cumulative_logprob"),
            **end,
            **request_end(message),
        )


class MultiplexAccepted(msgspec.Struct, frozen=True, gc=False):
    """A request that was admitted."""

    handle: int
    """The request's handle."""
    request_id: str
    """The request's id, for `abort`."""


class _Refusal(msgspec.Struct, frozen=True):
    """The fields that a rejection and a failure share."""

    handle: int
    """The request's handle, which is reused after this step."""
    status: StatusError
    """The exception that a separate call would have raised."""


class MultiplexRejection(_Refusal, frozen=True):
    """A request that was refused. The other requests of the stream are not affected."""


class MultiplexFailure(_Refusal, frozen=True):
    """A request that failed after it was admitted. The other requests of the stream are not affected."""


class MultiplexPromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """A part of a request's prompt log probabilities. All parts arrive before the request's finish."""

    handle: int
    """The request's handle."""
    prompt_logprobs: PromptLogprobs
    """The part, for the prompt positions from its offset on."""

    @classmethod
    def from_proto(cls, message: pb.MultiplexPromptLogprobs) -> "MultiplexPromptLogprobs":
        """Convert from the protobuf message."""
        return cls(message.handle, PromptLogprobs.from_proto(message.prompt_logprobs))


class MultiplexStep(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one engine step for the requests of a stream, in columns; of several steps if the reader was slow.

    The columns have N entries. An entry is a run of new tokens of one sequence; a handle may have several entries,
    whose tokens are in order. `finished` applies after all tokens of the step. Handles, indexes and token ids are
    uint32.
    """

    handles: list[int] = []
    """Handle of each entry. Shape [N]."""
    indexes: list[int] = []
    """Sequence index of each entry. Shape [N]. Empty: all are 0."""
    token_counts: list[int] = []
    """Number of tokens of each entry. Shape [N]. Empty: each entry has one token."""
    token_ids: list[int] = []
    """The tokens of all entries, concatenated. Shape [sum of token_counts]."""
    logprobs: MultiplexLogprobs | None = None
    """Log probabilities of the entries whose requests asked for them. None: no entry has any."""
    finished: list[MultiplexFinish] = []
    """Sequences that finished."""
    rejected: list[MultiplexRejection] = []
    """Requests that were refused. Aborts that arrived after the finish are not reported."""
    accepted: list[MultiplexAccepted] = []
    """Requests that were admitted. Arrives before anything else of the request."""
    failed: list[MultiplexFailure] = []
    """Requests that failed after they were admitted."""
    prompt_logprobs: MultiplexPromptLogprobs | None = None
    """A part of a request's prompt log probabilities, in a step of its own. None: this step has no part."""

    def runs(self) -> Iterator[tuple[int, int, list[int], Logprobs | None]]:
        """Yield each entry as handle, sequence index, token ids and log probabilities.

        If `indexes` and `token_counts` are empty, zip(step.handles, step.token_ids) yields the same, and is faster.
        """
        logprobs = iter(()) if self.logprobs is None else self._logprobs_of_runs(self.logprobs)
        position, next_logprobs = next(logprobs, (None, None))
        start = 0
        columns = zip(self.handles, self.indexes or repeat(0), self.token_counts or repeat(1), strict=False)
        for entry, (handle, index, count) in enumerate(columns):
            token_ids = self.token_ids[start : start + count]
            start += count
            if entry == position:
                yield handle, index, token_ids, next_logprobs
                position, next_logprobs = next(logprobs, (None, None))
            else:
                yield handle, index, token_ids, None

    def _logprobs_of_runs(self, columns: MultiplexLogprobs) -> Iterator[tuple[int, Logprobs]]:
        """Yield the position and log probabilities of each entry that has them."""
        counts = self.token_counts
        start = top_start = 0
        for entry, k in zip(columns.entries or range(len(self.handles)), columns.top_ks, strict=True):
            count = counts[entry] if counts else 1
            end, top_end = start + count, top_start + count * k
            yield (
                entry,
                Logprobs(
                    logprobs=columns.logprobs[start:end],
                    ranks=columns.ranks[start:end],
                    top_k=k,
                    top_token_ids=columns.top_token_ids[top_start:top_end],
                    top_logprobs=columns.top_logprobs[top_start:top_end],
                ),
            )
            start, top_start = end, top_end

    @classmethod
    def from_proto(cls, message: pb.MultiplexStep) -> "MultiplexStep":
        """Convert from the protobuf message. Raises ValueError if its columns do not match."""
        # A slice is a list that is made in C. Iterating a repeated field costs a microsecond even if it is empty.
        handles, indexes, counts = message.handles[:], message.indexes[:], message.token_counts[:]
        token_ids = message.token_ids[:]
        num_entries = len(handles)
        if (
            (indexes and len(indexes) != num_entries)
            or (counts and len(counts) != num_entries)
            or len(token_ids) != (sum(counts) if counts else num_entries)
        ):
            raise ValueError("columns of tokens have different lengths")
        logprobs = MultiplexLogprobs.from_proto(message.logprobs, num_entries) if message.HasField("logprobs") else None
        # `runs` looks up the counts of these entries.
        if counts and logprobs is not None and max(logprobs.entries, default=0) >= num_entries:
            raise ValueError("log probabilities of an entry that is not there")
        return cls(
            handles=handles,
            indexes=indexes,
            token_counts=counts,
            token_ids=token_ids,
            logprobs=logprobs,
            finished=_each(MultiplexFinish.from_proto, message.finished),
            rejected=[refused for refused in _each(_rejection, message.rejected) if _is_of_submit(refused)],
            accepted=_each(_accepted, message.accepted),
            failed=_each(_failure, message.failed),
        )


def _each(convert: Callable[[_Message], _T], messages: Sequence[_Message]) -> list[_T]:
    return [convert(message) for message in messages] if messages else []


def _accepted(message: pb.MultiplexAccepted) -> MultiplexAccepted:
    return MultiplexAccepted(message.handle, message.request_id)


def _rejection(message: pb.MultiplexRejection) -> MultiplexRejection:
    return MultiplexRejection(message.handle, error_from_status(message.status))


def _is_of_submit(rejection: MultiplexRejection) -> bool:
    return rejection.status.reason != Reason.UNKNOWN_HANDLE


def _failure(message: pb.MultiplexFailure) -> MultiplexFailure:
    return MultiplexFailure(message.handle, error_from_status(message.status))
