"""Rates from the counters of two samples of an engine's load."""

from typing import NamedTuple

from tokenwire._engine_load import EngineLoad, RankLoad


class Sample(NamedTuple):
    """An engine's load and the time of its sample."""

    load: EngineLoad
    at: float
    """Seconds of a monotonic clock."""


class Rates(NamedTuple):
    """Rates of a rank between two samples. None: unknown."""

    generation_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    prefix_cache_hit_rate: float | None = None
    """Fraction of the prompt tokens looked up that were found, 0 to 1."""


def rates(before: Sample | None, after: Sample) -> list[Rates]:
    """Return the rates of each rank of `after`; unknown if `before` is None or from another run of the server."""
    earlier = {} if before is None else {rank.data_parallel_rank: rank for rank in before.load.ranks}
    seconds = 0.0 if before is None else after.at - before.at
    return [_rates(earlier.get(rank.data_parallel_rank), rank, seconds) for rank in after.load.ranks]


def _rates(before: RankLoad | None, after: RankLoad, seconds: float) -> Rates:
    if before is None or seconds <= 0:
        return Rates()
    queries = _increase(before.prefix_cache_queries, after.prefix_cache_queries)
    hits = _increase(before.prefix_cache_hits, after.prefix_cache_hits)
    return Rates(
        _ratio(_increase(before.generation_tokens, after.generation_tokens), seconds),
        _ratio(_increase(before.prompt_tokens, after.prompt_tokens), seconds),
        _ratio(hits, queries),
    )


def _increase(before: int | None, after: int | None) -> int | None:
    # A counter that has decreased belongs to a server that was restarted.
    return None if before is None or after is None or after < before else after - before


def _ratio(increase: int | None, by: float | None) -> float | None:
    return None if increase is None or not by else increase / by
