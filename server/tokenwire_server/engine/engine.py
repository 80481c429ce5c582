"""The engine: owns AsyncLLM; all calls to it are made here."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from tokenwire.v1 import engine_info_pb2, engine_load_pb2, generation_pb2
from tokenwire_server.conversion.converter import RequestConverter
from tokenwire_server.conversion.exceptions import FAULTS, translate
from tokenwire_server.conversion.info import engine_info
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.conversion.model_info import ModelInfo
from tokenwire_server.conversion.request import EngineRequest, remote_prefill
from tokenwire_server.engine.barrier import AbortBarrier
from tokenwire_server.engine.direct import install_direct_path, pump
from tokenwire_server.engine.eos import eos_token_id
from tokenwire_server.engine.sink import Sink
from tokenwire_server.engine.startup import get_ready
from tokenwire_server.engine.stats import StatsRecorder
from tokenwire_server.errors import engine_dead

logger = logging.getLogger(__name__)

_BARRIER_TIMEOUT = 10.0
"""Maximum seconds to wait for the engine to act on an abort: a first step with log probabilities can take 3."""
_SHUTDOWN_TIMEOUT = 5.0
"""Seconds for the engine process to exit before it is killed."""


class Engine:
    """A running AsyncLLM in tokens-only mode.

    Create it with `build`, which blocks until the model is loaded, then call `start` on the event loop.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        keep_tokenizer: bool = False,
        served_model_names: Sequence[str] = (),
        adapters: Iterable[LoRARequest] = (),
        direct_path: bool = True,
        refused_field: Callable[[SamplingParams], str | None] | None = None,
        stats: StatsRecorder | None = None,
    ) -> None:
        """Take ownership of an AsyncLLM whose output handler has not started.

        Args:
            llm: the engine, with the model loaded.
            keep_tokenizer: whether it has a tokenizer.
            served_model_names: names of the base model; `llm` keeps only the first.
            adapters: LoRA adapters that requests can select.
            direct_path: whether to use the direct path, if vLLM's internals are compatible.
            refused_field: returns the name of the first sampling field that the device does not support; None if it
                supports all.
            stats: the stat logger of `llm`; None if statistics are disabled.

        """
        self._llm = llm
        self._adapters = {adapter.lora_name: adapter for adapter in adapters}
        self.limits = RequestLimits.from_config(
            llm.vllm_config, keep_tokenizer=keep_tokenizer, served_model_names=served_model_names
        )
        self.model_info = ModelInfo.from_config(llm.vllm_config)
        self._eos_token_id = eos_token_id(llm.model_config)
        if not keep_tokenizer:
            # Without a tokenizer vLLM has no EOS id: EOS would be reported as a stop token, and a model whose
            # generation_config has no EOS id would never stop.
            llm.renderer.get_eos_token_id = lambda: self._eos_token_id
        self._stats = stats or StatsRecorder()
        self._direct = install_direct_path(llm) if direct_path else None
        self.convert = RequestConverter(
            llm.input_processor,
            self.limits,
            self._adapters,
            refused_field=refused_field,
            wants_deltas=self._takes_direct_path,
        ).convert
        """Checks a request against what the engine allows, and converts it for `add`."""
        self._barrier = AbortBarrier(llm.is_paused, _BARRIER_TIMEOUT)
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def build(
        cls,
        args: AsyncEngineArgs,
        *,
        keep_tokenizer: bool,
        adapters: Iterable[LoRARequest] = (),
        direct_path: bool = True,
        refused_field: Callable[[SamplingParams], str | None] | None = None,
    ) -> "Engine":
        """Load the model and start the engine process. Blocks for up to minutes; call it in a thread.

        Args:
            args: vLLM's engine arguments.
            keep_tokenizer: whether to load the tokenizer, for structured outputs and thinking token budgets.
            adapters: LoRA adapters that requests can select.
            direct_path: whether to use the direct path, if vLLM's internals are compatible.
            refused_field: returns the name of the first sampling field that the device does not support; None if it
                supports all.

        Returns:
            The engine, which must be started with `start`.

        Raises:
            Exception: whatever vLLM raises for a model or configuration that cannot be loaded.

        """
        args.skip_tokenizer_init = not keep_tokenizer
        names = args.served_model_name or ()
        config = args.create_engine_config(UsageContext.API_SERVER)
        stats = StatsRecorder()
        llm = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.API_SERVER,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
            # Any stat logger would enable statistics.
            stat_loggers=None if args.disable_log_stats else [stats.logger_of_rank],
        )
        try:
            return cls(
                llm,
                keep_tokenizer=keep_tokenizer,
                served_model_names=[names] if isinstance(names, str) else names,
                adapters=adapters,
                direct_path=direct_path,
                refused_field=refused_field,
                stats=stats,
            )
        except BaseException:
            llm.shutdown()
            raise

    async def start(self) -> None:
        """Prepare the engine for requests; if that fails, shut it down.

        Raises:
            RequestError: UNSUPPORTED_METHOD, the model does not generate.
            AdapterError: an adapter cannot be loaded.

        """
        try:
            await get_ready(self._llm, self._adapters.values())
        except BaseException:
            await self.close()
            raise

    def check_admission(self, n: int) -> None:
        """Check that the engine's queue has room for a request of n sequences, before the request is converted.

        Raises:
            RequestError: QUEUE_FULL or QUEUED_TOKENS_LIMIT.

        """
        try:
            # The conversion refuses an n that is out of range, with a better error.
            self._llm.check_admission(min(max(n, 1), self.limits.max_n))
        except FAULTS as error:
            raise translate(error, "") from error

    def _takes_direct_path(self, params: SamplingParams) -> bool:
        return self._direct is not None and self._direct.takes(params)

    async def add(self, request: EngineRequest, sink: Sink, *, engine_id: str, path: str = "input") -> None:
        """Add a request to the engine; its outputs go to `sink`.

        A request that is cancelled or fails while being added is aborted in the engine as soon as possible.

        Args:
            request: the request, from `convert`.
            sink: receives the request's outputs.
            engine_id: the request's id in vLLM, unique among requests in flight.
            path: path of the GenerationInput in the request message, for errors.

        Raises:
            RequestError: the engine refuses the request or has died.

        """
        sink.prepare(request, self.abort_unless_ended, direct=self._takes_direct_path(request.params))
        try:
            with self._direct.expecting(engine_id, sink) if self._direct is not None else contextlib.nullcontext():
                collector = await self._add(request, engine_id)
        except BaseException as error:
            # The engine may have the request nevertheless: vLLM itself aborts it only if n > 1.
            if taken := self._llm.output_processor.external_req_ids.get(engine_id):
                sink.internal_id = taken[-1]
            self.abort_unless_ended(sink)
            if isinstance(error, FAULTS):
                raise translate(error, path) from error
            raise
        sink.internal_id = collector.request_id
        if sink.closed:
            self.abort_unless_ended(sink)
        if self._direct is None:
            _ = self._spawn(pump(collector, sink))

    async def _add(self, request: EngineRequest, engine_id: str) -> RequestOutputCollector:
        return await self._llm.add_request(
            engine_id,
            tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt),
            request.params,
            lora_request=request.lora_request,
            trace_headers=request.trace_headers,
            priority=request.priority,
            data_parallel_rank=request.data_parallel_rank,
            session_id=request.session_id,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            kv_hints=request.kv_hints,
        )

    def release_remote_prefill(self, message: generation_pb2.GenerationInput) -> None:
        """Notify the KV connector that a request prefilled by another engine will not run here. Never waits.

        Without this, that engine would hold the KV blocks until their lease expires.
        """
        if not self.limits.kv_transfer or (params := remote_prefill(message)) is None:
            return
        rank = message.data_parallel_rank if message.HasField("data_parallel_rank") else None
        if rank is not None and rank >= self.limits.data_parallel_size:
            rank = None
        # Made unique like an internal id: another request in flight may have the same id.
        request_id = f"{message.request_id}-{uuid.uuid4().hex[:8]}"
        _ = self._spawn(self._release(request_id, params, rank))

    async def _release(self, request_id: str, params: Mapping[str, Any], rank: int | None) -> None:
        try:
            await self._llm.notify_kv_transfer_request_rejected(request_id, params, data_parallel_rank=rank)
        except EngineDeadError:
            logger.debug("the engine died before a remote prefill was released")
        except Exception:
            logger.exception("could not release the remote prefill of request %s", request_id)

    def at_step_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the current engine step's outputs have been delivered, or soon if there is no step."""
        if self._direct is None or not self._direct.at_step_end(callback):
            asyncio.get_running_loop().call_soon(callback)

    def abort_unless_ended(self, *sinks: Sink) -> None:
        """Close sinks and abort their requests in the engine, in one call and without waiting. Safe to repeat.

        The single rule for aborts: a request that has an internal id and was not ended by the engine is aborted there.
        A request without an internal id is still being added, and `add` aborts it once it is in the engine.
        """
        for sink in sinks:
            sink.closed = True
        self.abort_soon([sink.internal_id for sink in sinks if sink.internal_id and not sink.ended])

    def abort_soon(self, internal_ids: Sequence[str]) -> None:
        """Abort requests in one engine call, without waiting; safe in a task that is being cancelled."""
        if internal_ids:
            _ = self._spawn(self._abort(internal_ids))

    async def abort(self, internal_ids: Sequence[str]) -> None:
        """Abort requests and wait until the engine has acted, with a timeout."""
        await asyncio.shield(self._spawn(self._abort(internal_ids)))
        await self._barrier.wait()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _abort(self, internal_ids: Sequence[str]) -> None:
        try:
            # An abort by external id would also abort a request that has reused the id. With a duplicate id vLLM
            # raises, and could never abort that request again.
            await self._llm.abort(list(dict.fromkeys(internal_ids)), internal=True)
        except EngineDeadError:
            logger.debug("the engine died before requests were aborted")
        except Exception:
            logger.exception("could not abort %d requests", len(internal_ids))

    def info(self) -> engine_info_pb2.EngineInfo:
        """Return the engine's model, limits and features."""
        return engine_info(
            self._llm.vllm_config,
            self.limits,
            eos_token_id=self._llm.renderer.get_eos_token_id(),
            adapters=self._adapters.values(),
        )

    def load(self) -> engine_load_pb2.EngineLoad:
        """Return the load of each rank, as of its last step."""
        message = engine_load_pb2.EngineLoad()
        self._stats.fill(message)
        return message

    def cached_tokens(self, internal_id: str, index: int) -> int | None:
        """Return the number of cached prompt tokens of a running sequence; None if not known."""
        states = self._llm.output_processor.request_states
        # With n > 1 each sequence has its own id.
        state = states.get(internal_id) or states.get(f"{index}_{internal_id}")
        if state is None or state.is_prefilling:
            return None
        count: int = state.num_cached_tokens
        return count

    @property
    def unfinished(self) -> int:
        """Number of sequences that the engine has not finished."""
        count: int = self._llm.get_num_unfinished_requests()
        return count

    def check_alive(self) -> None:
        """Raise RequestError, ENGINE_DEAD, if the engine has died."""
        if self._llm.errored:
            raise engine_dead()

    async def wait_for_failure(self, seconds: float) -> None:
        """Wait some seconds, or until the engine has failed its requests, which happens as soon as it dies."""
        handler = self._llm.output_handler
        if handler is None or handler.done():  # before the first request, or after the failure
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait([handler], timeout=seconds)

    async def probe(self) -> None:
        """Wait for the engine to respond to a call, which it does between two steps; an error is a response too."""
        with contextlib.suppress(Exception):
            await self._llm.is_paused()

    async def log_stats(self) -> None:
        """Log vLLM's own statistics."""
        await self._llm.do_log_stats()

    async def close(self) -> None:
        """Stop the output handler, then the engine process. Safe to repeat."""
        if (handler := self._llm.output_handler) is not None:
            # vLLM cancels the handler only after the engine process has exited, which the handler may log as a failure.
            handler.cancel()
            await asyncio.wait([handler])
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Stop the engine process, and kill it if it does not exit in time. Blocks for seconds. Safe to repeat."""
        self._llm.shutdown(timeout=_SHUTDOWN_TIMEOUT)
