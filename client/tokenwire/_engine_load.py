"""How busy an engine is. None means not known, a present zero is a fact."""

import msgspec

from tokenwire import _wire
from tokenwire.v1 import engine_load_pb2 as pb


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a data-parallel rank is, as of the engine's last step: gauges, and totals since the engine started."""

    data_parallel_rank: int
    """The rank, from 0."""
    num_running_reqs: int | None = None
    """Sequences that the scheduler runs."""
    num_waiting_reqs: int | None = None
    """Sequences that wait for a place in the scheduler, or for a grammar or another engine's KV cache."""
    kv_cache_usage: float | None = None
    """Share of the KV cache's blocks that running requests use, from 0 to 1."""
    prompt_tokens: int | None = None
    """Prompt tokens of requests whose prompt is done, in total, cached ones too."""
    generation_tokens: int | None = None
    """Generated tokens, in total."""
    prefix_cache_queries: int | None = None
    """Prompt tokens that were looked up in the prefix cache, in total."""
    prefix_cache_hits: int | None = None
    """Prompt tokens that the prefix cache had, in total."""
    num_preemptions: int | None = None
    """Times that a running sequence had to give its place up, in total."""

    @classmethod
    def from_proto(cls, message: pb.RankLoad) -> "RankLoad":
        """Convert the contract's message."""
        return cls(data_parallel_rank=message.data_parallel_rank, **_wire.optional(cls, message))


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine is."""

    num_live_requests: int
    """Requests of all callers that the server holds; one with n > 1 counts once."""
    ranks: tuple[RankLoad, ...] = ()
    """The load of each data-parallel rank, by rank. Empty: the server runs without statistics."""

    @classmethod
    def from_proto(cls, message: pb.EngineLoad) -> "EngineLoad":
        """Convert the contract's message."""
        return cls(num_live_requests=message.num_live_requests, ranks=tuple(map(RankLoad.from_proto, message.ranks)))
