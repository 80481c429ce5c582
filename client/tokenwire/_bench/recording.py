"""Arrival times of tokens: recorded cheaply during the run and summarized afterwards."""

import itertools
import time
from array import array
from collections.abc import Iterable, Sequence

import msgspec

_MS = 1e3


class RequestRecord:
    """Arrival times of one request's tokens. `tokens` is called for each message."""

    __slots__ = ("count", "ended", "prompt_tokens", "started", "times")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.started = time.perf_counter()
        self.times = array("d")
        """Arrival time of each message with tokens, in seconds of time.perf_counter."""
        self.count = 0
        """Number of tokens so far."""
        self.ended: float | None = None

    def tokens(self, count: int) -> None:
        """Record the arrival of a message with `count` tokens."""
        if count:
            self.times.append(time.perf_counter())
            self.count += count

    def end(self) -> None:
        """Record the end of the request."""
        self.ended = time.perf_counter()


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of durations, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Summary | None":
        """Summarize durations in seconds. None: there are none."""
        ordered = sorted(seconds)
        if not ordered:
            return None
        return cls(
            p50=percentile(ordered, 0.50) * _MS,
            p90=percentile(ordered, 0.90) * _MS,
            p99=percentile(ordered, 0.99) * _MS,
            mean=sum(ordered) / len(ordered) * _MS,
            max=ordered[-1] * _MS,
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile `share`, 0 to 1, of ascending values, with linear interpolation."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def times_to_first(records: Iterable[RequestRecord]) -> list[float]:
    """Return the seconds from each request's start to its first token."""
    return [record.times[0] - record.started for record in records if record.times]


def gaps(records: Iterable[RequestRecord]) -> list[float]:
    """Return the seconds between consecutive messages with tokens of each request.

    If a message has several tokens, this is the wait for all of them. An average per token would hide it.
    """
    return [after - before for record in records for before, after in itertools.pairwise(record.times)]


def end_to_end(records: Iterable[RequestRecord]) -> list[float]:
    """Return the seconds from start to end of each request that ended."""
    return [record.ended - record.started for record in records if record.ended is not None]
