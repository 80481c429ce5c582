"""From the totals of two looks at an engine's load to rates."""

from typing import NamedTuple

from tokenwire._engine_load import EngineLoad, RankLoad


class Sample(NamedTuple):
    """A load and when it was asked for."""

    load: EngineLoad
    at: float
    """Seconds, of a clock that never goes back."""


class Rates(NamedTuple):
    """What a rank did between two looks. None means not known."""

    generation_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    prefix_cache_hit_rate: float | None = None


def rates(before: Sample | None, after: Sample) -> list[Rates]:
    """Give the rates of each rank of `after`; not known where `before` is None or of another run of the server."""
    earlier = {} if before is None else {rank.data_parallel_rank: rank for rank in before.load.ranks}
    seconds = 0.0 if before is None else after.at - before.at
    return [_rates(earlier.get(rank.data_parallel_rank), rank, seconds) for rank in after.load.ranks]


def _rates(before: RankLoad | None, after: RankLoad, seconds: float) -> Rates:
    if before is None or seconds <= 0:
        return Rates()
    queries = _growth(before.prefix_cache_queries, after.prefix_cache_queries)
    hits = _growth(before.prefix_cache_hits, after.prefix_cache_hits)
    return Rates(
        _quotient(_growth(before.generation_tokens, after.generation_tokens), seconds),
        _quotient(_growth(before.prompt_tokens, after.prompt_tokens), seconds),
        _quotient(hits, queries),
    )


def _growth(before: int | None, after: int | None) -> int | None:
    # A total that has shrunk is that of a server which has started again.
    return None if before is None or after is None or after < before else after - before


def _quotient(growth: int | None, by: float | None) -> float | None:
    return None if growth is None or not by else growth / by
