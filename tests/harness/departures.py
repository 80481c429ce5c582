"""The ways in which a caller goes away: each is a block that starts a request and gives what ends it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal, NamedTuple

import grpc.aio

import tokenwire
from harness.proxy import CuttingProxy
from harness.simulated import Simulated, generation_input, submit, until, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

Rpc = Literal["Generate", "GenerateStream", "Multiplex"]
State = Literal["queued", "before the first token", "running"]

KILLED_CLIENT = Path(__file__).with_name("killed_client.py")
MAX_LOGPROBS = 500
"""So many fill the connection's window, 64 KiB, with a handful of tokens."""
DEADLINE = 2.0
"""Seconds: many times what it takes to get into the state, and less than a long prompt takes."""
LONG = range(100, 8000)
"""A prompt of 494 steps."""
SHORT = range(100, 132)
MAX_TOKENS = 8000
"""At 10 ms each more than any wait of a test."""


class Cell(NamedTuple):
    """One cell, its server, and its request's id."""

    simulated: Simulated
    rpc: Rpc
    state: State
    request_id: str

    def input(self, *, logprobs: int | None = None) -> generation_pb2.GenerationInput:
        prompt, max_tokens = (LONG, 100) if self.state == "before the first token" else (SHORT, MAX_TOKENS)
        message = generation_input(self.request_id, prompt, max_tokens=max_tokens, logprobs=logprobs)
        # No cell's prompt is in the cache for another.
        message.cache_salt = self.request_id
        return message

    def message(
        self, *, logprobs: int | None = None
    ) -> pb.GenerateRequest | pb.GenerateStreamRequest | pb.MultiplexRequest:
        match self.rpc:
            case "Generate":
                return pb.GenerateRequest(input=self.input(logprobs=logprobs))
            case "GenerateStream":
                return pb.GenerateStreamRequest(input=self.input(logprobs=logprobs))
            case "Multiplex":
                return submit(1, self.input(logprobs=logprobs))

    async def start(
        self, channel: grpc.aio.Channel, deadline: float | None = None, *, logprobs: int | None = None
    ) -> grpc.aio.Call:
        """Start the request on a channel."""
        message = self.message(logprobs=logprobs)
        stub = EngineServiceStub(channel)
        call: grpc.aio.Call
        if isinstance(message, pb.MultiplexRequest):
            call = multiplex = stub.Multiplex(timeout=deadline)
            await multiplex.write(message)
        else:
            call = getattr(stub, self.rpc)(message, timeout=deadline)
        await arrived(channel)
        return call

    def computed(self) -> int:
        """Return how many tokens of the request the device has computed."""
        return self.simulated.computed(self.request_id).tokens


async def arrived(channel: grpc.aio.Channel) -> None:
    """Wait until what has been sent on a channel is with the server: a later call is answered."""
    await within(EngineServiceStub(channel).GetEngineInfo(pb.GetEngineInfoRequest()))


Leave = Callable[[], Awaitable[None]]
Way = Callable[[Cell], contextlib.AbstractAsyncContextManager[Leave]]


@contextlib.asynccontextmanager
async def reset(cell: Cell) -> AsyncIterator[Leave]:
    async with behind_proxy(cell) as (proxy, channel):
        call = await cell.start(channel)
        yield asyncified(proxy.cut)
        assert await within(call.code()) == grpc.StatusCode.UNAVAILABLE


@contextlib.asynccontextmanager
async def killed(cell: Cell) -> AsyncIterator[Leave]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        KILLED_CLIENT,
        cell.simulated.address,
        cell.rpc,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(cell.message().SerializeToString())
        process.stdin.close()
        assert await within(process.stdout.readline()) == b"started\n"
        yield asyncified(process.kill)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def cancelled(cell: Cell) -> AsyncIterator[Leave]:
    async with cell.simulated.connect() as channel:
        call = await cell.start(channel)
        yield asyncified(call.cancel)


@contextlib.asynccontextmanager
async def deadline_over(cell: Cell) -> AsyncIterator[Leave]:
    async with cell.simulated.connect() as channel:
        call = await cell.start(channel, DEADLINE)

        async def wait() -> None:
            assert await within(call.code()) == grpc.StatusCode.DEADLINE_EXCEEDED

        yield wait


@contextlib.asynccontextmanager
async def iterator_left(cell: Cell) -> AsyncIterator[Leave]:
    """The Python client: its iterator's block is left; Generate has none, there the task that waits is cancelled."""
    request = tokenwire.SamplingParams(max_tokens=cell.input().sampling_params.max_tokens, ignore_eos=True)
    prompt = cell.input().prompt_token_ids
    options: tokenwire.GenerationOptions = {"request_id": cell.request_id, "cache_salt": cell.request_id}
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(tokenwire.AsyncClient(cell.simulated.address))
        request_stack = await stack.enter_async_context(contextlib.AsyncExitStack())
        match cell.rpc:
            case "Generate":
                task = asyncio.create_task(client.generate(prompt, request, **options))
                request_stack.callback(task.cancel)
            case "GenerateStream":
                await request_stack.enter_async_context(client.stream(prompt, request, **options))
            case "Multiplex":
                multiplex = await stack.enter_async_context(client.multiplex())
                await request_stack.enter_async_context(multiplex.submit(prompt, request, **options))
        # Lets the call go out.
        await asyncio.sleep(0)
        await within(client.engine_info())
        yield request_stack.aclose


@contextlib.asynccontextmanager
async def blocked_then_reset(cell: Cell) -> AsyncIterator[Leave]:
    async with blocked(cell) as (proxy, _):
        yield asyncified(proxy.cut)


@contextlib.asynccontextmanager
async def blocked_then_cancelled(cell: Cell) -> AsyncIterator[Leave]:
    async with blocked(cell) as (_, call):
        yield asyncified(call.cancel)


@contextlib.asynccontextmanager
async def blocked(cell: Cell) -> AsyncIterator[tuple[CuttingProxy, grpc.aio.Call]]:
    """Start the request on a stream that nobody reads, so that the server stands still in a write to it."""
    async with behind_proxy(cell) as (proxy, channel):
        if cell.state == "running":
            call = await cell.start(channel, logprobs=MAX_LOGPROBS)
            await stands_still(cell.simulated, proxy, cell.request_id)
        else:
            flood = generation_input(f"flood-{cell.request_id}", SHORT, max_tokens=MAX_TOKENS, logprobs=MAX_LOGPROBS)
            call = multiplex = EngineServiceStub(channel).Multiplex()
            await multiplex.write(submit(0, flood))
            await stands_still(cell.simulated, proxy, flood.request_id)
            await multiplex.write(submit(1, cell.input()))
            await arrived(channel)
        yield proxy, call


async def stands_still(simulated: Simulated, proxy: CuttingProxy, request_id: str) -> None:
    """Wait until nothing comes from the server any more though the device goes on with a request."""

    def steps() -> int:
        return simulated.computed(request_id).steps

    async with asyncio.timeout(30):
        while True:
            before, answered = steps(), proxy.answered
            await until(lambda: steps() >= before + 10)  # noqa: B023  # it is called before the loop goes on
            if before and proxy.answered == answered:
                return


@contextlib.asynccontextmanager
async def behind_proxy(cell: Cell) -> AsyncIterator[tuple[CuttingProxy, grpc.aio.Channel]]:
    # Without bandwidth probing the window stays at 64 KiB.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    async with (
        CuttingProxy(cell.simulated.address) as proxy,
        grpc.aio.insecure_channel(proxy.address, options) as channel,
    ):
        yield proxy, channel


def asyncified(act: Callable[[], object]) -> Leave:
    async def leave() -> None:
        act()

    return leave
