"""In place of vLLM's engine process: takes what AsyncLLM sends to it, and gives out the steps that a test asks for."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tokenwire_server.simulated_device import write_model_folder

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 64
EOS = 2
MAX_NUM_SEQS = 8

_LIMIT = 10.0
"""Seconds after which a wait of a test has failed."""


def make_config(folder: Path, **arguments: Any) -> VllmConfig:
    """Return vLLM's configuration for a small model folder, which is made where `folder` has none."""
    if not (folder / "config.json").exists():
        write_model_folder(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN, eos_token_id=EOS)
    settings = {"max_num_seqs": MAX_NUM_SEQS, "load_format": "dummy", "skip_tokenizer_init": True, **arguments}
    return AsyncEngineArgs(model=str(folder), **settings).create_engine_config(UsageContext.API_SERVER)


async def make_llm(config: VllmConfig, core: "FakeEngineCore") -> AsyncLLM:
    """Build a real AsyncLLM in front of a core; in a thread, as the server does, so that its output handler waits."""

    def build() -> AsyncLLM:
        with mock.patch.object(EngineCoreClient, "make_async_mp_client", return_value=core):
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    return await asyncio.to_thread(build)


class FakeRequest:
    """A sequence inside the engine: each of the n of a request is one."""

    def __init__(self, core: "FakeEngineCore", request: EngineCoreRequest) -> None:
        self.request = request
        """What AsyncLLM sent."""
        self._core = core

    @property
    def internal_id(self) -> str:
        internal_id: str = self.request.request_id
        return internal_id

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params

    @property
    def live(self) -> bool:
        """Whether the engine still works on it."""
        return self.internal_id in self._core.live

    def step(self, *token_ids: int, finish: str | None = None, stop: int | str | None = None, **values: Any) -> None:
        """Play an engine step that gave it these tokens."""
        self._core.play((self, token_ids, finish, stop, values))


Step = tuple[FakeRequest, tuple[int, ...], str | None, int | str | None, dict[str, Any]]


class FakeEngineCore:
    """Stands in for AsyncLLM's client of the engine process."""

    def __init__(self) -> None:
        self.live: dict[str, FakeRequest] = {}
        self.refusal: Exception | None = None
        """What sending a request raises."""
        self.answer: list[int] | None = None
        """Where set, each request ends at once with these tokens, and `next_request` does not tell of it."""
        self.admission = asyncio.Event()
        """While cleared, a request has reached the engine but the call that sent it does not return."""
        self.confirmation = asyncio.Event()
        """While cleared, the engine is in a long step: it answers no utility call."""
        self.readiness = asyncio.Event()
        """While cleared, the engine does not say what it can do."""
        self.admission.set()
        self.confirmation.set()
        self.readiness.set()
        self.tasks: tuple[str, ...] = ("generate",)
        self.was_shut_down = False
        self.was_asked = asyncio.Event()
        """Set once AsyncLLM has asked for the tasks."""
        self.released: list[EngineCoreRequest] = []
        """What came only to tell the KV connector that it will not run."""
        self.adapters: list[LoRARequest] = []
        """Adapters that were loaded."""
        self.resources = SimpleNamespace(engine_dead=False)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        self._arrivals: asyncio.Queue[FakeRequest] = asyncio.Queue()
        self._aborts: asyncio.Queue[list[str]] = asyncio.Queue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    # For tests

    async def next_request(self) -> FakeRequest:
        """Wait for the next sequence to arrive in the engine."""
        return await asyncio.wait_for(self._arrivals.get(), _LIMIT)

    async def next_requests(self, count: int) -> list[FakeRequest]:
        """Wait for the sequences of a request with n."""
        return [await self.next_request() for _ in range(count)]

    async def next_abort(self) -> list[str]:
        """Wait for the next message with aborts and return its internal ids."""
        return await asyncio.wait_for(self._aborts.get(), _LIMIT)

    @property
    def idle(self) -> bool:
        """Whether the engine is empty, and the test has looked at each request and abort that came."""
        return not self.live and self._arrivals.empty() and self._aborts.empty()

    def play(self, *steps: Step) -> None:
        """Play one engine step for several sequences. Those that were aborted get nothing."""
        outputs: list[EngineCoreOutput] = []
        weight_version = None
        for request, token_ids, finish, stop, values in steps:
            if not request.live:
                continue
            weight_version = values.pop("weight_version", weight_version)
            reason = None if finish is None else FinishReason[finish.upper()]
            if reason is not None:
                del self.live[request.internal_id]
            outputs.append(
                EngineCoreOutput(request.internal_id, list(token_ids), finish_reason=reason, stop_reason=stop, **values)
            )
        if outputs:
            self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs, weight_version=weight_version))

    def die(self) -> None:
        """Let the engine process die."""
        self.resources.engine_dead = True
        self._outputs.put_nowait(EngineDeadError())

    # What AsyncLLM calls

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        self.was_asked.set()
        await self.readiness.wait()
        return self.tasks

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError
        if self.refusal is not None:
            raise self.refusal
        # The engine process gets requests in this form, and an exception while it reads one would end it.
        self._decoder.decode(self._encoder.encode(request))
        if request.abort_immediately:
            self.released.append(request)
            return
        sequence = self.live[request.request_id] = FakeRequest(self, request)
        if self.answer is not None:
            sequence.step(*self.answer, finish="length")
        else:
            self._arrivals.put_nowait(sequence)
        await self.admission.wait()
        if self.resources.engine_dead:
            raise EngineDeadError

    async def add_lora_async(self, adapter: LoRARequest) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.adapters.append(adapter)
        return True

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self._aborts.put_nowait(list(request_ids))
            for request_id in request_ids:
                self.live.pop(request_id, None)

    async def is_scheduler_paused_async(self) -> bool:
        await self.confirmation.wait()
        return False

    async def get_output_async(self) -> EngineCoreOutputs:
        self._loop = asyncio.get_running_loop()
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def shutdown(self, timeout: float | None = None) -> None:
        _ = timeout
        if self._loop is not None and not self.was_shut_down:
            # vLLM's ends the task that reads from the engine process, which tells it to AsyncLLM so.
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, EngineDeadError())
        self.was_shut_down = True
