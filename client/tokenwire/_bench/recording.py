"""When tokens came: cheap to write while they come, summed up afterwards."""

import itertools
import time
from array import array
from collections.abc import Iterable, Sequence

import msgspec

_MS = 1e3


class RequestRecord:
    """When the tokens of one request came. `tokens` is called for each message."""

    __slots__ = ("count", "ended", "prompt_tokens", "started", "times")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.started = time.perf_counter()
        self.times = array("d")
        """When messages with tokens came."""
        self.count = 0
        """Tokens so far."""
        self.ended: float | None = None

    def tokens(self, count: int) -> None:
        """Note the arrival of a message with `count` tokens."""
        if count:
            self.times.append(time.perf_counter())
            self.count += count

    def end(self) -> None:
        """Note the end."""
        self.ended = time.perf_counter()


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How some durations are distributed, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Summary | None":
        """Sum up; None where there is nothing to."""
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
    """Give the value that `share` of the ascending values do not exceed, linearly between two of them."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def times_to_first(records: Iterable[RequestRecord]) -> list[float]:
    """Give the seconds from each request's start to its first token."""
    return [record.times[0] - record.started for record in records if record.times]


def gaps(records: Iterable[RequestRecord]) -> list[float]:
    """Give the seconds between messages with tokens that follow each other in a request.

    Where a message holds several tokens, that is the wait for all of them: spreading it over the tokens would hide it.
    """
    return [after - before for record in records for before, after in itertools.pairwise(record.times)]


def end_to_end(records: Iterable[RequestRecord]) -> list[float]:
    """Give the seconds from start to end of the requests that ended."""
    return [record.ended - record.started for record in records if record.ended is not None]
