"""Engine statistics for GetLoad: gauges as of the last step and totals, per data-parallel rank."""

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from tokenwire.v1 import engine_load_pb2 as pb


class StatsRecorder:
    """Records the statistics of every data-parallel rank; pass `logger_of_rank` to vLLM as a stat logger factory."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankRecorder] = {}

    def logger_of_rank(self, config: VllmConfig, rank: int) -> StatLoggerBase:
        """Return the stat logger of a rank; vLLM calls this once per rank."""
        self._ranks[rank] = recorder = _RankRecorder(config, rank)
        return recorder

    def fill(self, message: pb.EngineLoad) -> None:
        """Add the load of every rank to the message, by ascending rank."""
        message.ranks.extend(self._ranks[rank].load for rank in sorted(self._ranks))


class _RankRecorder(StatLoggerBase):  # type: ignore[misc]  # vLLM has no types
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        del vllm_config
        self.load = pb.RankLoad(
            data_parallel_rank=engine_index,
            num_running_reqs=0,
            num_waiting_reqs=0,
            kv_cache_usage=0.0,
            prompt_tokens=0,
            generation_tokens=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_preemptions=0,
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Record the statistics of an engine step.

        Args:
            scheduler_stats: state of the scheduler after the step; None if the engine sent none.
            iteration_stats: token and request counts of the step; None if the step produced no outputs.
            mm_cache_stats: not used.
            engine_idx: not used; vLLM creates a logger per rank.

        """
        del mm_cache_stats, engine_idx
        load = self.load
        if scheduler_stats is not None:
            load.num_running_reqs = scheduler_stats.num_running_reqs
            load.num_waiting_reqs = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            load.kv_cache_usage = scheduler_stats.kv_cache_usage
            load.prefix_cache_queries += scheduler_stats.prefix_cache_stats.queries
            load.prefix_cache_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            load.prompt_tokens += iteration_stats.num_prompt_tokens
            load.generation_tokens += iteration_stats.num_generation_tokens
            load.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Do nothing; the server logs that the engine is ready."""
