"""The response of VllmEngine's GetLoads."""

import datetime as dt
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from smg_grpc_proto import vllm_engine_pb2 as smg

from tokenwire.v1 import engine_info_pb2, engine_load_pb2

_MIN_INTERVAL = 1.0
"""Seconds over which a rate is measured at least; below that it would depend on single engine steps."""


class _Reading(NamedTuple):
    seconds: float
    generation_tokens: int


class Loads:
    """Builds the responses. A rank's throughput is measured since its previous reading, at least a second earlier."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a builder without readings; `clock` returns seconds."""
        self._clock = clock
        self._readings: dict[int, _Reading] = {}
        self._throughputs: dict[int, float] = {}

    def response(self, info: engine_info_pb2.EngineInfo, load: engine_load_pb2.EngineLoad, rank: int | None) -> Any:
        """Return the response to GetLoads.

        Args:
            info: the contract's description of the engine.
            load: the load of the engine. If the engine records no statistics, all live requests are reported as running
                requests of rank 0.
            rank: the requested data-parallel rank; None means all.

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
        previous = self._readings.get(rank)
        if previous is None:
            self._readings[rank] = _Reading(now, tokens)
        elif (interval := now - previous.seconds) >= _MIN_INTERVAL:
            self._throughputs[rank] = (tokens - previous.generation_tokens) / interval
            self._readings[rank] = _Reading(now, tokens)
        return self._throughputs.get(rank, 0.0)
