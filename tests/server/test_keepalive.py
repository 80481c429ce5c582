"""Callers may ping as often as they like: a server that counted pings as abuse would end whole connections.

A proxy looks at the HTTP/2 frames, so that the tests wait for pings and not for time. FIELD_LOG 1, 2.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, within
from fake_engine.server import generation_input
from harness.proxy import CuttingProxy
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire_server.transport import server as transport_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING, GOAWAY = 0x6, 0x7
ACK = 0x1
PINGS = 6
"""More than the two that gRPC's own servers forgive."""


class FrameCounter:
    """A TCP proxy that counts HTTP/2 frames."""

    def __init__(self) -> None:
        self.address = ""
        self.connections = 0
        self.pings = 0
        """From the caller, acknowledgements not counted."""
        self.answers: Counter[int] = Counter()
        """Frames from the server by type."""

    @classmethod
    @contextlib.asynccontextmanager
    async def run(cls, target: str) -> AsyncIterator["FrameCounter"]:
        self = cls()
        host, _, port = target.rpartition(":")
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []

            async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self.connections += 1
                back_reader, back_writer = await asyncio.open_connection(host, int(port))
                tasks.append(group.create_task(_pump(reader, back_writer, len(PREFACE), self._from_caller)))
                tasks.append(group.create_task(_pump(back_reader, writer, 0, self._from_server)))

            listener = await asyncio.start_server(connected, "127.0.0.1", 0)
            self.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                listener.close()
                for task in tasks:
                    task.cancel()

    async def until_pinged(self, times: int) -> None:
        """Wait until the caller has pinged so often from now on."""
        enough = self.pings + times

        async def wait() -> None:
            while self.pings < enough:  # noqa: ASYNC110  # what it looks at is bytes on their way
                await asyncio.sleep(0.01)

        await asyncio.wait_for(wait(), 60)

    def _from_caller(self, kind: int, flags: int) -> None:
        self.pings += kind == PING and not flags & ACK

    def _from_server(self, kind: int, flags: int) -> None:  # noqa: ARG002  # one shape for both directions
        self.answers[kind] += 1


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, preface: int, seen: Callable[[int, int], None]
) -> None:
    try:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await reader.readexactly(preface))
            while True:
                head = await reader.readexactly(9)
                writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
                seen(head[3], head[4])
                await writer.drain()
    finally:
        writer.transport.abort()


def connect(address: str) -> grpc.aio.Channel:
    """Connect with pings as often as gRPC's core sends them: once a second, even where less is asked for."""
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options)


def request() -> pb.GenerateRequest:
    return pb.GenerateRequest(input=generation_input((1, 2, 3), None, {}))


async def test_callers_may_ping_while_a_call_is_silent_and_while_none_is_there(server: FakeEngineServer) -> None:
    async def silent() -> None:
        async with FrameCounter.run(server.transport.address) as frames, connect(frames.address) as channel:
            call = EngineServiceStub(channel).Generate(request())
            sequence = await server.core.next_request()
            await frames.until_pinged(PINGS)
            sequence.step(5, finish="length")
            assert list((await within(call)).outputs[0].token_ids) == [5]
            assert frames.connections == 1
            assert GOAWAY not in frames.answers

    async def idle() -> None:
        async with FrameCounter.run(server.transport.address) as frames, connect(frames.address) as channel:
            await channel.channel_ready()
            await frames.until_pinged(PINGS)
            info = await within(EngineServiceStub(channel).GetEngineInfo(pb.GetEngineInfoRequest()))
            assert info.HasField("info")
            assert frames.connections == 1
            assert GOAWAY not in frames.answers

    await asyncio.gather(silent(), idle())


async def test_the_proxy_sees_what_a_server_with_grpcs_own_settings_does() -> None:
    """Else the tests above would hold whatever the server did."""
    other = grpc.aio.server()
    released = asyncio.Event()

    async def wait(_: bytes, __: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await released.wait()
        return b""

    handler: Any = grpc.unary_unary_rpc_method_handler(wait)
    other.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("other.Service", {"Wait": handler}),))
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    try:
        async with FrameCounter.run(f"127.0.0.1:{port}") as frames, connect(frames.address) as channel:
            method: Any = channel.unary_unary("/other.Service/Wait")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(method(b""), 60)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert GOAWAY in frames.answers
    finally:
        released.set()
        await other.stop(0)


async def test_a_caller_that_freezes_is_noticed_after_the_ping_timeout(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS F2: with gRPC's own default of a minute the engine would be told after the test's limit."""
    monkeypatch.setattr(transport_server, "_KEEPALIVE_TIME_MS", 1_000)
    monkeypatch.setattr(transport_server, "_KEEPALIVE_TIMEOUT_MS", 500)
    async with FakeEngineServer.run(vllm_config) as server, CuttingProxy(server.transport.address) as proxy:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(proxy.address, options) as channel:
            request = pb.GenerateStreamRequest(input=generation_input([1, 2, 3], None, {}))
            call = EngineServiceStub(channel).GenerateStream(request)
            sequence = await server.core.next_request()
            sequence.step(5)
            await within(call.read())
            proxy.freeze()
            assert await server.core.next_abort() == [sequence.internal_id]
            await within(server.registry.idle())
