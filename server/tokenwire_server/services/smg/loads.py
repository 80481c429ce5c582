"""What VllmEngine's GetLoads says."""

import datetime as dt
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from smg_grpc_proto import vllm_engine_pb2 as smg

from tokenwire.v1 import engine_info_pb2, engine_load_pb2

_SHORTEST_INTERVAL = 1.0
"""Seconds; a rate over less would tell of single steps."""


class _Reading(NamedTuple):
    seconds: float
    generation_tokens: int


class Loads:
    """Makes the answers; a rank's throughput is that since the reading before, a second ago or longer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a reporter; `clock` gives seconds."""
        self._clock = clock
        self._readings: dict[int, _Reading] = {}
        self._throughputs: dict[int, float] = {}

    def response(self, info: engine_info_pb2.EngineInfo, load: engine_load_pb2.EngineLoad, rank: int | None) -> Any:
        """Return the answer.

        Args:
            info: the engine.
            load: its load. Without statistics, the live requests count as those of the first rank.
            rank: the one rank that is asked for; None means all.

        """
        response = smg.GetLoadsResponse(
            timestamp=dt.datetime.now(dt.UTC).isoformat(),
            version=info.vllm_version,
            dp_rank_count=info.parallelism.data_parallel_size,
        )
        ranks = load.ranks or [engine_load_pb2.RankLoad(num_running_reqs=load.num_live_requests)]
        for rank_load in ranks:
            if rank is None or rank_load.data_parallel_rank == rank:
                self._add(response, info, rank_load)
        return response

    def _add(self, response: Any, info: engine_info_pb2.EngineInfo, load: engine_load_pb2.RankLoad) -> None:
        capacity = info.kv_cache.num_blocks * info.kv_cache.block_size
        queries = load.prefix_cache_queries
        response.loads.add(
            dp_rank=load.data_parallel_rank,
            num_running_reqs=load.num_running_reqs,
            num_waiting_reqs=load.num_waiting_reqs,
            num_total_reqs=load.num_running_reqs + load.num_waiting_reqs,
            num_used_tokens=round(load.kv_cache_usage * capacity),
            max_total_num_tokens=capacity,
            token_usage=load.kv_cache_usage,
            gen_throughput=self._throughput(load),
            cache_hit_rate=load.prefix_cache_hits / queries if queries else 0.0,
            utilization=load.num_running_reqs / info.limits.max_num_seqs,
            max_running_requests=info.limits.max_num_seqs,
        )

    def _throughput(self, load: engine_load_pb2.RankLoad) -> float:
        rank, tokens, now = load.data_parallel_rank, load.generation_tokens, self._clock()
        before = self._readings.get(rank)
        if before is None:
            self._readings[rank] = _Reading(now, tokens)
        elif (interval := now - before.seconds) >= _SHORTEST_INTERVAL:
            self._throughputs[rank] = (tokens - before.generation_tokens) / interval
            self._readings[rank] = _Reading(now, tokens)
        return self._throughputs.get(rank, 0.0)
