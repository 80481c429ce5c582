"""The only owner of AsyncLLM."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from tokenwire._contract import Reason
from tokenwire.v1 import engine_info_pb2, generation_pb2
from tokenwire_server import simulated_device
from tokenwire_server.engine.barrier import AbortBarrier
from tokenwire_server.engine.direct import DirectOutputProcessor, Pump, incompatibility
from tokenwire_server.engine.eos import eos_token_id
from tokenwire_server.engine.faults import FAULTS, translate
from tokenwire_server.engine.info import engine_info
from tokenwire_server.engine.limits import RequestLimits
from tokenwire_server.engine.request import EngineRequest, to_engine
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError, engine_dead, unsupported_field

logger = logging.getLogger(__name__)

_BARRIER_TIMEOUT = 10.0
"""Seconds: a first step with log probabilities was seen to take 3."""


class Engine:
    """A running AsyncLLM in tokens-only mode.

    Build it with `build`, which blocks for the whole load, then call `start` on the event loop.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        keep_tokenizer: bool = False,
        adapters: Iterable[LoRARequest] = (),
        direct_path: bool = True,
        refused_field: Callable[[SamplingParams], str | None] | None = None,
    ) -> None:
        """Take over an AsyncLLM whose output handler has not started.

        Args:
            llm: the engine, ready but for its event loop.
            keep_tokenizer: whether it has a tokenizer.
            adapters: LoRA adapters that requests may name.
            direct_path: whether outputs may take the direct path, where vLLM's internals allow it.
            refused_field: names the first sampling field that the engine's device does not honour.

        """
        self._llm = llm
        self._adapters = {adapter.lora_name: adapter for adapter in adapters}
        self.limits = RequestLimits.from_config(llm.vllm_config, keep_tokenizer=keep_tokenizer)
        self._eos_token_id = eos_token_id(llm.model_config)
        if not keep_tokenizer:
            # Without a tokenizer vLLM knows no EOS, so natural EOS would be reported as a stop token, and a model whose
            # generation_config names no EOS would never stop.
            llm.renderer.get_eos_token_id = lambda: self._eos_token_id
        self._refused_field = refused_field
        self._direct = _direct_path(llm) if direct_path else None
        self._barrier = AbortBarrier(llm.is_paused, _BARRIER_TIMEOUT)
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def build(
        cls,
        args: AsyncEngineArgs,
        *,
        keep_tokenizer: bool,
        direct_path: bool = True,
        simulated: bool = False,
    ) -> "Engine":
        """Load the model and start the engine process. Blocks, up to minutes; call it in a thread."""
        args.skip_tokenizer_init = not keep_tokenizer
        config = args.create_engine_config(UsageContext.API_SERVER)
        llm = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.API_SERVER,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
        )
        try:
            return cls(
                llm,
                keep_tokenizer=keep_tokenizer,
                direct_path=direct_path,
                refused_field=simulated_device.unsupported if simulated else None,
            )
        except BaseException:
            llm.shutdown()
            raise

    async def start(self) -> None:
        """Make the engine ready for requests.

        Raises:
            RequestError: the model cannot generate, UNSUPPORTED_METHOD.

        """
        tasks = await self._llm.get_supported_tasks()
        if "generate" not in tasks:
            raise RequestError(
                Reason.UNSUPPORTED_METHOD, f"this model does not generate; it supports {', '.join(tasks)}"
            )
        # vLLM asks for environment variables at every token, and keeps them only after this.
        envs.enable_envs_cache()
        # Full collections over vLLM's and torch's modules were seen to stop the server for 350 ms.
        gc.collect()
        gc.freeze()

    def request(
        self, message: generation_pb2.GenerationInput, request_id: str, *, stream: bool, path: str = "input"
    ) -> EngineRequest:
        """Check and convert a request.

        Raises:
            RequestError: the request is refused.

        """
        request = to_engine(message, self.limits, self._adapters, request_id=request_id, stream=stream, path=path)
        if self._refused_field is not None and (name := self._refused_field(request.params)) is not None:
            raise unsupported_field(f"{path}.sampling_params.{name}", "the simulated device does not honour it")
        return request

    async def add(self, request: EngineRequest, sink: Sink, path: str = "input") -> None:
        """Hand a request to the engine; its outputs go to `sink`.

        Raises:
            RequestError: the engine refuses it or has died.

        """
        if self._direct is not None:
            self._direct.expect(request.request_id, sink, request.params)
        else:
            sink.prepare(request.params, direct=False)
        try:
            collector = await self._llm.add_request(
                request.request_id,
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
        except FAULTS as error:
            raise translate(error, path) from error
        finally:
            if self._direct is not None:
                self._direct.forget(request.request_id)
        sink.internal_id = collector.request_id
        if self._direct is None:
            _ = self._spawn(Pump.run(collector, sink))

    def at_step_end(self, callback: Callable[[], None]) -> None:
        """Call back once the outputs of the running engine step are all there; soon, where none is running."""
        if self._direct is None or not self._direct.at_step_end(callback):
            asyncio.get_running_loop().call_soon(callback)

    def abort_soon(self, internal_ids: Sequence[str]) -> None:
        """Abort requests in one engine call, without waiting: safe where the caller itself is being cancelled."""
        _ = self._spawn(self._abort(internal_ids))

    async def abort(self, internal_ids: Sequence[str]) -> None:
        """Abort requests and wait until the engine has let go of them, within limits."""
        await asyncio.shield(self._spawn(self._abort(internal_ids)))
        await self._barrier.wait()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _abort(self, internal_ids: Sequence[str]) -> None:
        try:
            # The external form would hit every request of an id, also one that has reused it.
            await self._llm.abort(internal_ids, internal=True)
        except EngineDeadError:
            logger.debug("the engine died before an abort")
        except Exception:
            logger.exception("could not abort %d requests", len(internal_ids))

    def info(self) -> engine_info_pb2.EngineInfo:
        """Say what the engine is and can do."""
        return engine_info(
            self._llm.vllm_config,
            self.limits,
            eos_token_id=self._llm.renderer.get_eos_token_id(),
            adapters=self._adapters.values(),
        )

    @property
    def unfinished(self) -> int:
        """Number of sequences that the engine has not finished."""
        count: int = self._llm.get_num_unfinished_requests()
        return count

    def check_alive(self) -> None:
        """Raise RequestError, ENGINE_DEAD, if the engine has died."""
        if self._llm.errored:
            raise engine_dead()

    async def log_stats(self) -> None:
        """Write vLLM's own statistics line to the log."""
        await self._llm.do_log_stats()

    def shutdown(self) -> None:
        """End the engine process. Blocks for seconds at most; safe to repeat."""
        self._llm.shutdown()


def _direct_path(llm: AsyncLLM) -> DirectOutputProcessor | None:
    if (reason := incompatibility(llm)) is not None:
        logger.warning("the direct path is off, so a token costs more CPU: %s", reason)
        return None
    config = llm.vllm_config
    only_ordinary = bool(
        config.aux_output_config.enable_return_routed_experts or config.model_config.return_sampling_mask
    )
    direct = DirectOutputProcessor(llm.output_processor, only_ordinary=only_ordinary)
    llm.output_processor = direct
    return direct
