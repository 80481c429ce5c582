"""What a Multiplex stream tells in one message: columns as on the wire, no object for each token."""

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
    """Log probabilities of a step's entries, in columns laid out as in Logprobs."""

    entries: list[int]
    """The entries that have log probabilities, as positions in the step's columns, ascending. Empty: all have."""
    top_ks: list[int]
    """Number k of further ids for each of those entries' tokens."""
    logprobs: list[float]
    """Log probability of each token of those entries."""
    ranks: list[int]
    """Rank of each token in the vocabulary; 1 is the most likely."""
    top_token_ids: list[int]
    """The k further ids for each token, token after token."""
    top_logprobs: list[float]
    """Log probabilities of `top_token_ids`."""

    @classmethod
    def from_proto(cls, message: pb.MultiplexLogprobs, num_entries: int) -> "MultiplexLogprobs":
        """Convert the contract's message of a step with that many entries. Raises ValueError."""
        entries, top_ks = message.entries[:], message.top_ks[:]
        fits = (
            len(top_ks) == (len(entries) or num_entries)
            and (not entries or entries[-1] < num_entries)
            and len(message.logprobs) == len(message.ranks)
            and len(message.top_token_ids) == len(message.top_logprobs)
        )
        if not fits:
            raise ValueError("columns of log probabilities do not fit together")
        return cls(
            entries=entries,
            top_ks=top_ks,
            logprobs=message.logprobs[:],
            ranks=message.ranks[:],
            top_token_ids=message.top_token_ids[:],
            top_logprobs=message.top_logprobs[:],
        )


class MultiplexFinish(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a sequence."""

    handle: int
    """The request's handle."""
    index: int
    """Which of the n sequences, from 0."""
    finish_reason: FinishReason
    """Why it ended."""
    stop_token_id: int | None = None
    """As in SequenceOutput."""
    last: bool
    """Whether this is the request's last sequence to end. The handle is given out again after this step."""
    usage: Usage | None = None
    """Token counts. None: not the request's last sequence."""
    timing: Timing | None = None
    """When things happened. None: not reported, or not the request's last sequence."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of the sequence's tokens. None: not asked for."""
    kv_transfer_params_json: str | None = None
    """What the engine's KV connector gave back: JSON, verbatim. None: nothing, or not the request's last sequence."""
    ec_transfer_params_json: str | None = None
    """What the engine's encoder-cache connector gave back: JSON, verbatim. None: nothing, or not the request's last
    sequence."""
    sampling_mask: SamplingMask | None = None
    """The token ids that sampling could have chosen, for each token of the sequence. None: not returned."""
    routed_experts: RoutedExperts | None = None
    """As in SequenceOutput."""
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    """As in SequenceOutput."""
    speculative_decoding: SpeculativeDecoding | None = None
    """As in SequenceOutput."""

    @classmethod
    def from_proto(cls, message: pb.MultiplexFinish) -> "MultiplexFinish":
        """Convert the contract's message."""
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
    """A submit that was admitted."""

    handle: int
    """The request's handle."""
    request_id: str
    """The request's id, for `abort`."""


class _Refusal(msgspec.Struct, frozen=True):
    """What a rejection and a failure have in common."""

    handle: int
    """The request's handle; it is given out again after this step."""
    status: StatusError
    """Why: what a call of its own would have raised."""


class MultiplexRejection(_Refusal, frozen=True):
    """A submit that was refused. Nothing else on the stream is affected."""


class MultiplexFailure(_Refusal, frozen=True):
    """A request that failed after it was admitted. Nothing else on the stream is affected."""


class MultiplexPromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """A part of a request's prompt log probabilities. All parts come before the request's finish."""

    handle: int
    """The request's handle."""
    prompt_logprobs: PromptLogprobs
    """The part; its offset says where it belongs."""

    @classmethod
    def from_proto(cls, message: pb.MultiplexPromptLogprobs) -> "MultiplexPromptLogprobs":
        """Convert the contract's message."""
        return cls(message.handle, PromptLogprobs.from_proto(message.prompt_logprobs))


class MultiplexStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of a stream got in one step of the engine, in columns; in several, where the reader was slow.

    An entry is a run of new tokens of one sequence. A handle may appear in several entries: their tokens follow each
    other in order. `finished` applies after all tokens of the step.
    """

    handles: list[int] = []
    """Handle of each entry."""
    indexes: list[int] = []
    """Sequence of each entry, from 0. Empty: all are 0."""
    token_counts: list[int] = []
    """Number of tokens of each entry. Empty: each has one."""
    token_ids: list[int] = []
    """The tokens, entry after entry."""
    logprobs: MultiplexLogprobs | None = None
    """Log probabilities of the entries that asked for them. None: none did."""
    finished: list[MultiplexFinish] = []
    """Sequences that ended."""
    rejected: list[MultiplexRejection] = []
    """Submits that were refused. An abort that crossed the finish is not told."""
    accepted: list[MultiplexAccepted] = []
    """Submits that were admitted: before anything else of the request."""
    failed: list[MultiplexFailure] = []
    """Requests that failed after they were admitted."""
    prompt_logprobs: MultiplexPromptLogprobs | None = None
    """A part of a request's prompt log probabilities; it comes alone. None: the step has none."""

    def runs(self) -> Iterator[tuple[int, int, list[int], Logprobs | None]]:
        """Give each entry as its handle, sequence, tokens and their log probabilities.

        Where `indexes` and `token_counts` are empty, zip(step.handles, step.token_ids) is the same, and faster.
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
        """Give the entries that have log probabilities with them."""
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
        """Convert the contract's message. Raises ValueError where its columns do not fit together."""
        # Slices are lists, made in C at once; even an empty repeated field costs a microsecond to iterate.
        handles, indexes, counts = message.handles[:], message.indexes[:], message.token_counts[:]
        token_ids = message.token_ids[:]
        num_entries = len(handles)
        if (
            (indexes and len(indexes) != num_entries)
            or (counts and len(counts) != num_entries)
            or len(token_ids) != (sum(counts) if counts else num_entries)
        ):
            raise ValueError("columns of tokens do not fit together")
        return cls(
            handles=handles,
            indexes=indexes,
            token_counts=counts,
            token_ids=token_ids,
            logprobs=(
                MultiplexLogprobs.from_proto(message.logprobs, num_entries) if message.HasField("logprobs") else None
            ),
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
