"""An engine's load. None means unknown; zero is a value."""

import msgspec

from tokenwire import _wire
from tokenwire.v1 import engine_load_pb2 as pb


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a data-parallel rank as of its last step: gauges, and counters since the start. None: unknown."""

    data_parallel_rank: int
    """Index of the rank, from 0."""
    num_running_reqs: int | None = None
    """Number of running sequences."""
    num_waiting_reqs: int | None = None
    """Number of sequences that wait to be scheduled, for a grammar, or for another engine's KV cache."""
    kv_cache_usage: float | None = None
    """Fraction of the KV cache's blocks used by running requests, 0 to 1."""
    prompt_tokens: int | None = None
    """Counter of prompt tokens of requests that completed prefill, including cached tokens."""
    generation_tokens: int | None = None
    """Counter of generated tokens."""
    prefix_cache_queries: int | None = None
    """Counter of prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int | None = None
    """Counter of prompt tokens found in the prefix cache."""
    num_preemptions: int | None = None
    """Counter of preemptions of running sequences."""

    @classmethod
    def from_proto(cls, message: pb.RankLoad) -> "RankLoad":
        """Convert from the protobuf message."""
        return cls(data_parallel_rank=message.data_parallel_rank, **_wire.optional(cls, message))


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine and its server."""

    num_live_requests: int
    """Number of live requests of all callers; a request with n > 1 counts once."""
    ranks: tuple[RankLoad, ...] = ()
    """Load of each data-parallel rank, by rank. Empty: the server runs without statistics."""

    @classmethod
    def from_proto(cls, message: pb.EngineLoad) -> "EngineLoad":
        """Convert from the protobuf message."""
        return cls(num_live_requests=message.num_live_requests, ranks=tuple(map(RankLoad.from_proto, message.ranks)))
