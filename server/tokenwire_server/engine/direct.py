"""The direct path: delivers the engine process's outputs to sinks, without a RequestOutput, event or task per token.

It replaces AsyncLLM's OutputProcessor and relies on the following internals of vLLM, which `incompatibility` checks:

- `OutputProcessor.add_request(request, prompt, parent_req, request_index, queue)` creates a `RequestState`, and
  outputs are delivered to its `queue` with `put`;
- `OutputProcessor.process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats, weight_version)` is
  called for at most 128 outputs of an engine step at a time, and `update_scheduler_stats` once at the end of the step;
- `_update_stats_from_output`, `_finish_request` and `_update_stats_from_finished` update vLLM's own state.

Requests that need more than the tokens and log probabilities of one sequence take the ordinary path, vLLM's own, to
the same sinks.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
    RequestState,
)
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import internal_error

logger = logging.getLogger(__name__)

_EXPECTED = {
    OutputProcessor.add_request: ("self", "request", "prompt", "parent_req", "request_index", "queue"),
    OutputProcessor.process_outputs: (
        "self",
        "engine_core_outputs",
        "engine_core_timestamp",
        "iteration_stats",
        "weight_version",
    ),
    OutputProcessor.abort_requests: ("self", "request_ids", "internal"),
    OutputProcessor.update_scheduler_stats: ("self", "scheduler_stats"),
    OutputProcessor._update_stats_from_output: (  # noqa: SLF001  # the internals this module depends on
        "self",
        "req_state",
        "engine_core_output",
        "engine_core_timestamp",
        "iteration_stats",
    ),
    OutputProcessor._update_stats_from_finished: (  # noqa: SLF001
        "self",
        "req_state",
        "finish_reason",
        "iteration_stats",
    ),
    OutputProcessor._finish_request: ("self", "req_state"),  # noqa: SLF001
}
_OUTPUT_FIELDS = {
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "finish_reason",
    "stop_reason",
    "kv_transfer_params",
    "ec_transfer_params",
    "prefill_stats",
    "spec_decode_metrics",
}
_IGNORED_OUTPUT_FIELDS = {
    # Only in outputs of requests that take the ordinary path.
    "new_prompt_logprobs_tensors",
    "new_sampling_mask",
    "pooling_output",
    "prompt_token_id_logprobs",
    "routed_experts",
    # Of no use to a caller.
    "events",
    "mm_cache_miss_hashes",
    "num_nans_in_logits",
    "trace_headers",
    # Since vLLM 0.33, read if it is there.
    "error",
}


def incompatibility(llm: AsyncLLM) -> str | None:
    """Return why the direct path cannot be used with this vLLM and engine; None if it can."""
    for function, expected in _EXPECTED.items():
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            return f"{function.__qualname__} takes {found}, not {expected}"
    if missing := _OUTPUT_FIELDS - set(EngineCoreOutput.__struct_fields__):
        return f"EngineCoreOutput has no {', '.join(sorted(missing))}"
    if unknown := set(EngineCoreOutput.__struct_fields__) - _OUTPUT_FIELDS - _IGNORED_OUTPUT_FIELDS:
        logger.warning("this version of vLLM has outputs that are not passed on: %s", ", ".join(sorted(unknown)))
    if type(llm.output_processor) is not OutputProcessor:
        return f"AsyncLLM has a {type(llm.output_processor).__name__}"
    if llm.output_handler is not None:
        return "AsyncLLM has already started its output handler"
    return None


def install_direct_path(llm: AsyncLLM) -> "DirectOutputProcessor | None":
    """Replace AsyncLLM's OutputProcessor and return the new one; log a warning and return None if incompatible."""
    if (reason := incompatibility(llm)) is not None:
        logger.warning("the direct path is disabled, so each token costs more CPU time: %s", reason)
        return None
    config = llm.vllm_config
    only_ordinary = bool(
        config.aux_output_config.enable_return_routed_experts or config.model_config.return_sampling_mask
    )
    direct = DirectOutputProcessor(llm.output_processor, only_ordinary=only_ordinary)
    llm.output_processor = direct
    return direct


def eligible(params: SamplingParams) -> bool:
    """Return whether the direct path supports everything that a request needs."""
    return (
        params.n == 1
        and params.prompt_logprobs is None
        and params.prompt_logprob_token_ids is None
        and (params.stream_interval is None or params.stream_interval == 1)
    )


class DirectOutputProcessor(OutputProcessor):  # type: ignore[misc]  # mypy does not read vLLM
    """vLLM's OutputProcessor with sinks instead of queues."""

    def __init__(self, original: OutputProcessor, *, only_ordinary: bool) -> None:
        """Make a replacement for AsyncLLM's own.

        Args:
            original: the one that AsyncLLM created.
            only_ordinary: whether the engine returns outputs that the direct path does not support.

        """
        super().__init__(
            original.tokenizer,
            log_stats=original.log_stats,
            stream_interval=original.stream_interval,
            tracing_enabled=original.tracing_enabled,
            admission_stats=original.admission_stats,
        )
        self._possible = not (only_ordinary or original.tracing_enabled or original.stream_interval > 1)
        self._expected: dict[str, Sink] = {}
        self._in_step = False
        self._step_end: list[Callable[[], None]] = []

    def takes(self, params: SamplingParams) -> bool:
        """Return whether a request's outputs will take the direct path."""
        return self._possible and eligible(params)

    @contextlib.contextmanager
    def expecting(self, request_id: str, sink: Sink) -> Iterator[None]:
        """Register a sink for the request that AsyncLLM adds inside the block.

        Args:
            request_id: the id passed to AsyncLLM.
            sink: receives the request's outputs.

        """
        self._expected[request_id] = sink
        try:
            yield
        finally:
            self._expected.pop(request_id, None)

    def at_step_end(self, callback: Callable[[], None]) -> bool:
        """Call `callback` after the last output of the current engine step; return False if there is no step."""
        if self._in_step:
            self._step_end.append(callback)
        return self._in_step

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Register a request, with its sink in place of its queue.

        Args:
            request: the request to the engine process.
            prompt: the prompt's text; None in tokens-only mode.
            parent_req: the request that a sequence belongs to; None if n is 1.
            request_index: index of the sequence.
            queue: vLLM's queue for the outputs, which is used if no sink is expected.

        """
        sink = self._expected.get(request.external_req_id)
        super().add_request(request, prompt, parent_req, request_index, queue if sink is None else sink)

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:  # noqa: FBT001  # vLLM's signature
        """Abort requests, without an output for one that is being added.

        Only AsyncLLM itself aborts such a request, because adding it has failed: its caller gets that reason.

        Returns:
            The internal ids to abort in the engine process.

        """
        request_ids = list(request_ids)
        if internal and self._expected:
            for request_id in request_ids:
                state = self.request_states.get(request_id)
                if state is not None and state.external_req_id in self._expected:
                    state.queue = None
        aborted: list[str] = super().abort_requests(request_ids, internal)
        return aborted

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        """Deliver a part of a step's outputs to their sinks.

        Args:
            engine_core_outputs: the outputs.
            engine_core_timestamp: `time.monotonic` time at which the engine process created the outputs.
            iteration_stats: vLLM's statistics of the step; None if they are disabled.
            weight_version: version of the weights in this step; None if the engine does not report versions.

        Returns:
            The ordinary path's result, without the outputs that were delivered to sinks.

        """
        self._in_step = True
        ordinary: list[EngineCoreOutput] = []
        states = self.request_states
        for output in engine_core_outputs:
            state = states.get(output.request_id)
            if state is None:
                continue  # already aborted
            sink = state.queue
            if not isinstance(sink, Sink) or not sink.direct:
                ordinary.append(output)
                continue
            self._update_stats_from_output(state, output, engine_core_timestamp, iteration_stats)
            if state.is_prefilling:
                _end_prefill(state, output)
            # An exception would shut down the server; it fails only this request instead.
            try:
                if output.finish_reason is None:
                    sink.step(output, weight_version)
                else:
                    sink.last_step(
                        output,
                        output.finish_reason,
                        state.stats,
                        state.num_cached_tokens,
                        output.spec_decode_metrics,
                        weight_version,
                    )
            except Exception:
                logger.exception("could not deliver an output of request %s", state.external_req_id)
                sink.fail(internal_error())
            if output.finish_reason is not None:
                self._finish_request(state)
                self._update_stats_from_finished(state, output.finish_reason, iteration_stats)
        if not ordinary:
            return OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])
        return super().process_outputs(ordinary, engine_core_timestamp, iteration_stats, weight_version)

    def update_scheduler_stats(self, scheduler_stats: SchedulerStats | None) -> None:
        """Record the end of an engine step."""
        super().update_scheduler_stats(scheduler_stats)
        self._in_step = False
        if self._step_end:
            callbacks, self._step_end = self._step_end, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    logger.exception("a callback at the end of an engine step failed")


def _end_prefill(state: RequestState, output: EngineCoreOutput) -> None:
    # As in OutputProcessor.process_outputs.
    if output.prefill_stats is not None:
        state.num_cached_tokens = output.prefill_stats.num_cached_tokens
        state.num_cache_creation_tokens = output.prefill_stats.num_cache_creation_tokens
    if state.remote_prefill_cached_tokens is not None:
        state.num_cached_tokens = state.remote_prefill_cached_tokens
    state.is_prefilling = False


async def pump(collector: RequestOutputCollector, sink: Sink) -> None:
    """Deliver all outputs of a request from vLLM's queue, in a task per request; used without the direct path."""
    finished = False
    while not finished:
        try:
            output = collector.get_nowait() or await collector.get()
        except Exception as error:  # noqa: BLE001  # the sink translates it
            sink.put(error)
            return
        assert isinstance(output, RequestOutput)
        finished = output.finished
        sink.put(output)
