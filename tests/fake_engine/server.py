"""A real gRPC server on a free port over an AsyncLLM with a `FakeEngineCore`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio
from vllm.config import VllmConfig

from fake_engine.core import FakeEngineCore, make_llm
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire.v1.sampling_params_pb2 import SamplingParams
from tokenwire_server.config import ServerConfig
from tokenwire_server.engine.engine import Engine
from tokenwire_server.requests.registry import Registry
from tokenwire_server.services import engine as engine_service
from tokenwire_server.services import smg
from tokenwire_server.services.host import Host
from tokenwire_server.transport.server import Transport

_T = TypeVar("_T")
_LIMIT = 10.0


async def within(awaitable: Awaitable[_T]) -> _T:
    """Wait with a limit, so that a hang fails the test and not the run."""

    async def wait() -> _T:
        return await awaitable

    return await asyncio.wait_for(wait(), _LIMIT)


async def read(call: grpc.aio.UnaryStreamCall[Any, _T] | grpc.aio.StreamStreamCall[Any, _T]) -> _T:
    """Read the next message of a stream that has one."""
    message = await within(call.read())
    assert message is not grpc.aio.EOF
    return cast("_T", message)


async def collect(call: grpc.aio.UnaryStreamCall[Any, _T] | grpc.aio.StreamStreamCall[Any, _T]) -> list[_T]:
    """Read a stream to its end."""
    messages: list[_T] = []
    while (message := await within(call.read())) is not grpc.aio.EOF:
        messages.append(cast("_T", message))
    return messages


class FakeEngineServer:
    """The server's parts, and a stub of grpc's own on a channel to it."""

    channel: grpc.aio.Channel
    stub: EngineServiceStub

    def __init__(self, core: FakeEngineCore, engine: Engine, config: ServerConfig) -> None:
        self.core = core
        self.engine = engine
        self.registry = Registry(engine, config.max_requests_per_client)
        self.host = Host(config)
        self.state = self.host.state
        self.transport = Transport(config, [engine_service.service(self.host), *smg.services(self.host)])

    @classmethod
    @contextlib.asynccontextmanager
    async def run(
        cls, config: VllmConfig, *, server: ServerConfig | None = None, ready: bool = True, **engine: Any
    ) -> AsyncIterator[Self]:
        """Start a server; where `ready` is false it is still loading. `engine` is what `Engine` takes."""
        core = FakeEngineCore()
        llm = await make_llm(config, core)
        self = cls(core, Engine(llm, **engine), server or ServerConfig(port=0))
        await self.transport.start()
        watching = asyncio.create_task(self.transport.watch_files())
        if ready:
            self.serve()
            await self.transport.set_serving(True)
        try:
            async with self.connect() as channel:
                self.channel = channel
                self.stub = EngineServiceStub(channel)
                yield self
        finally:
            watching.cancel()
            await self.transport.stop(0)
            await self.engine.close()

    def serve(self) -> None:
        """The engine has loaded."""
        self.state.serve(self.engine, self.registry)

    def connect(self, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
        """Open another connection, not shared with any other channel."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if credentials is None:
            return grpc.aio.insecure_channel(self.transport.address, options)
        return grpc.aio.secure_channel(self.transport.address, credentials, options)

    def generate(
        self, prompt: Iterable[int] = (1, 2, 3), *, timeout: float | None = None, sampling: Any = None, **fields: Any
    ) -> grpc.aio.UnaryUnaryCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Call Generate."""
        request = pb.GenerateRequest(input=generation_input(prompt, sampling, fields))
        return self.stub.Generate(request, timeout=timeout)

    def stream(
        self, prompt: Iterable[int] = (1, 2, 3), *, timeout: float | None = None, sampling: Any = None, **fields: Any
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]:
        """Call GenerateStream."""
        request = pb.GenerateStreamRequest(input=generation_input(prompt, sampling, fields))
        return self.stub.GenerateStream(request, timeout=timeout)

    async def abort(self, *request_ids: str, **fields: Any) -> list[pb.AbortOutcome.ValueType]:
        """Call Abort and return the outcomes."""
        response = await within(self.stub.Abort(pb.AbortRequest(request_ids=request_ids, **fields)))
        assert [result.request_id for result in response.results] == list(request_ids)
        return [result.outcome for result in response.results]

    async def check_alive(self) -> None:
        """Check that the engine serves the next call."""
        call = self.generate([7])
        request = await self.core.next_request()
        request.step(8, finish="length")
        response = await within(call)
        assert list(response.outputs[0].token_ids) == [8]


def generation_input(prompt: Iterable[int], sampling: Any, fields: dict[str, Any]) -> GenerationInput:
    """Build an input; `sampling` is a message or a dict of its fields."""
    if isinstance(sampling, dict):
        sampling = SamplingParams(**sampling)
    return GenerationInput(prompt_token_ids=prompt, sampling_params=sampling, **fields)
