"""A call that its caller leaves behind frees the engine, in whatever state it is."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, FakeRequest, read, within
from harness.proxy import CuttingProxy
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.access.caller import Caller
from tokenwire_server.services.call_sink import CallSink

INPUT = GenerationInput(prompt_token_ids=[1, 2, 3])

each_rpc = pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
before_or_after = pytest.mark.parametrize("tokens", [[], [5]], ids=["before the first token", "after it"])


@pytest.fixture(params=[True, False], ids=["direct", "ordinary"])
async def server(request: pytest.FixtureRequest, vllm_config: VllmConfig) -> Any:
    async with FakeEngineServer.run(vllm_config, direct_path=request.param) as running:
        yield running


async def started(server: FakeEngineServer, call: Any, tokens: list[int], *, stream: bool) -> FakeRequest:
    """Wait until a call's request is in the engine and has got the tokens."""
    # A call that nobody awaits does not go out.
    task = asyncio.ensure_future(call.read() if stream else call.wait_for_connection())
    request = await server.core.next_request()
    if tokens:
        request.step(*tokens)
    if tokens and stream:
        await within(task)
    return request


async def gone(server: FakeEngineServer, *requests: FakeRequest) -> None:
    """Check that the engine was told once, by internal ids, and that nothing is left."""
    for request in requests:
        assert await server.core.next_abort() == [request.internal_id]
    await within(server.registry.idle())
    assert server.engine.unfinished == 0
    # Whatever else might come has come once another request is through.
    await server.check_alive()
    assert server.core.idle


@each_rpc
@before_or_after
async def test_the_caller_cancels(server: FakeEngineServer, stream: bool, tokens: list[int]) -> None:
    call = server.stream() if stream else server.generate()
    request = await started(server, call, tokens, stream=stream)
    assert call.cancel()
    await gone(server, request)


@each_rpc
@before_or_after
async def test_the_deadline_passes(server: FakeEngineServer, stream: bool, tokens: list[int]) -> None:
    call = server.stream(timeout=0.3) if stream else server.generate(timeout=0.3)
    request = await started(server, call, tokens, stream=stream)
    assert await within(call.code()) == grpc.StatusCode.DEADLINE_EXCEEDED
    await gone(server, request)


@each_rpc
async def test_all_sequences_go(server: FakeEngineServer, stream: bool) -> None:
    call = server.stream(sampling={"n": 3}) if stream else server.generate(sampling={"n": 3})
    sequences = await server.core.next_requests(3)
    call.cancel()
    assert sorted(await server.core.next_abort()) == sorted(sequence.internal_id for sequence in sequences)
    await gone(server)


@each_rpc
@before_or_after
async def test_the_channel_is_closed(server: FakeEngineServer, stream: bool, tokens: list[int]) -> None:
    channel = server.connect()
    stub = EngineServiceStub(channel)
    call: Any = (
        stub.GenerateStream(pb.GenerateStreamRequest(input=INPUT))
        if stream
        else stub.Generate(pb.GenerateRequest(input=INPUT))
    )
    request = await started(server, call, tokens, stream=stream)
    await channel.close()
    await gone(server, request)


@each_rpc
@before_or_after
async def test_the_connection_breaks(server: FakeEngineServer, stream: bool, tokens: list[int]) -> None:
    async with (
        CuttingProxy(server.transport.address) as proxy,
        grpc.aio.insecure_channel(proxy.address) as channel,
    ):
        stub = EngineServiceStub(channel)
        call: Any = (
            stub.GenerateStream(pb.GenerateStreamRequest(input=INPUT))
            if stream
            else stub.Generate(pb.GenerateRequest(input=INPUT))
        )
        request = await started(server, call, tokens, stream=stream)
        proxy.cut()
        await gone(server, request)


async def test_many_calls_of_one_connection_break_together(server: FakeEngineServer) -> None:
    async with (
        CuttingProxy(server.transport.address) as proxy,
        grpc.aio.insecure_channel(proxy.address) as channel,
    ):
        stub = EngineServiceStub(channel)
        calls = [stub.GenerateStream(pb.GenerateStreamRequest(input=INPUT)) for _ in range(5)]
        requests = await server.core.next_requests(5)
        proxy.cut()
        aborted = [internal_id for _ in calls for internal_id in await server.core.next_abort()]
        assert sorted(aborted) == sorted(request.internal_id for request in requests)
        await gone(server)


async def test_the_handler_is_blocked_in_a_write(server: FakeEngineServer) -> None:
    call = server.stream(request_id="a")
    request = await server.core.next_request()
    request.step(5)
    await read(call)
    live = server.registry.find(Caller("", ""), "a")
    assert live is not None
    assert isinstance(live.sink, CallSink)
    # More than the connection's window holds, so that a write waits for the reader and outputs wait for the write.
    async with asyncio.timeout(10):
        while not live.sink.waiting():
            request.step(*[5] * 500_000)
            await asyncio.sleep(0.01)
    call.cancel()
    await gone(server, request)


@each_rpc
@pytest.mark.parametrize("n", [1, 2])
async def test_the_request_is_still_on_its_way_into_the_engine(server: FakeEngineServer, stream: bool, n: int) -> None:
    server.core.admission.clear()
    call = server.stream(sampling={"n": n}) if stream else server.generate(sampling={"n": n})
    await server.core.next_request()
    call.cancel()
    await within(server.registry.idle())
    server.core.admission.set()
    await server.check_alive()
    assert not server.core.live
    assert server.engine.unfinished == 0


async def test_a_call_that_has_ended_is_not_aborted(server: FakeEngineServer) -> None:
    call = server.stream()
    request = await server.core.next_request()
    request.step(5, finish="length")
    await read(call)
    call.cancel()
    await gone(server)


async def test_an_abort_call_that_is_cancelled_has_aborted_all_the_same(server: FakeEngineServer) -> None:
    server.core.confirmation.clear()
    call = server.generate(request_id="a")
    request = await server.core.next_request()
    abort = server.stub.Abort(pb.AbortRequest(request_ids=["a"]))
    assert await server.core.next_abort() == [request.internal_id]
    abort.cancel()
    await within(call)
    server.core.confirmation.set()
    await gone(server)
