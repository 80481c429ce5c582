"""Random bytes at the door: in place of a message, in place of HTTP/2, and in the middle of it.

gRPC answers what is no gRPC; what is no message of ours is refused by us. Neither is logged, and nothing stays of it.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, collect, within
from fake_engine.fuzz import Rig, check_refusal, class_of, examples, messages
from tokenwire.v1 import engine_service_pb2 as pb

OURS = pb.DESCRIPTOR.services_by_name["EngineService"].methods
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].methods
REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods
METHODS = [*OURS, *HEALTH, *REFLECTION]

each_method = pytest.mark.parametrize("method", METHODS, ids=[method.full_name for method in METHODS])
pytestmark = pytest.mark.timeout(1200)

LOST_WRITE = "Internal error from Core"
"""grpc.aio's own text, with INTERNAL, where a write meets the answer; it keeps the answer from the caller."""
CORRUPT = b"\xff\xff\xff"


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def answer(
    server: FakeEngineServer, method: MethodDescriptor, *bodies: bytes, deadline: float | None = None
) -> list[bytes]:
    """Call a method with these bytes as its messages, and return what comes; `Watch` would go on after the first."""
    # A stream each way is what all methods are on the wire.
    call: Any = server.channel.stream_stream(path_of(method))(timeout=deadline)
    try:
        for body in bodies:
            await call.write(body)
        await call.done_writing()
    except asyncio.InvalidStateError:
        pass  # it has been answered already
    except grpc.aio.AioRpcError as error:
        if error.details() != LOST_WRITE:
            raise
        return []
    found: list[bytes] = []
    while (message := await within(call.read())) is not grpc.aio.EOF:
        found.append(message)
        if method.name == "Watch":
            call.cancel()
            break
    return found


def spoilt(method: MethodDescriptor) -> st.SearchStrategy[bytes]:
    """Return bodies: any bytes, and messages that are cut short or go on for too long."""
    valid = messages(method.input_type).map(lambda message: bytes(message.SerializeToString()))
    cut = st.tuples(valid, st.floats(0, 1)).map(lambda pair: pair[0][: int(len(pair[0]) * pair[1])])
    return st.binary(max_size=200) | cut | st.tuples(valid, st.binary(max_size=20)).map(b"".join)


@each_method
def test_a_body_of_random_bytes(vllm_config: VllmConfig, method: MethodDescriptor) -> None:
    async def send(body: bytes) -> None:
        try:
            await answer(rig.server, method, body)
        except grpc.aio.AioRpcError as error:
            # The health service's own answer for a name that it does not know.
            if error.code() != grpc.StatusCode.NOT_FOUND or method not in HEALTH:
                check_refusal(error)
        await rig.check_empty()

    with Rig.run(vllm_config) as rig:

        @examples(60)
        @given(spoilt(method))
        def sent(body: bytes) -> None:
            rig.do(send, body)

        sent()


@each_method
async def test_a_body_that_is_no_message_is_refused_and_not_logged(
    server: FakeEngineServer, method: MethodDescriptor, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answer(server, method, CORRUPT)
    check_refusal(refused.value)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records
    await server.check_alive()


async def test_a_multiplex_stream_ends_with_a_body_that_is_no_message(server: FakeEngineServer) -> None:
    submit = pb.MultiplexRequest()
    submit.submit.input.prompt_token_ids[:] = [1]
    method = next(method for method in OURS if method.name == "Multiplex")
    call: Any = server.channel.stream_stream(path_of(method))()
    await call.write(submit.SerializeToString())
    request = await server.core.next_request()
    await call.write(CORRUPT)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await collect(call)
    check_refusal(refused.value)
    assert await server.core.next_abort() == [request.internal_id]
    await server.check_alive()
    assert server.core.idle


def good_message(method: MethodDescriptor) -> Any:
    message: Any = class_of(method.input_type)()
    if method.name in {"Generate", "GenerateStream"}:
        message.input.prompt_token_ids[:] = [1]
    elif method.name == "Abort":
        message.request_ids[:] = ["a"]
    return message


@each_method
@pytest.mark.parametrize("count", [0, 2])
async def test_a_wrong_number_of_messages(
    server: FakeEngineServer, method: MethodDescriptor, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC itself reads one message where it expects one, and waits where there is none until the caller goes away."""
    server.core.answer = [5]
    body = good_message(method).SerializeToString()
    if count or method.client_streaming:
        await answer(server, method, *[body] * count)
    else:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await answer(server, method, deadline=0.2)
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert not caplog.records
    server.core.answer = None
    await server.check_alive()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """Return a header in HPACK, literal and not indexed."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def call_headers(path: str) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a", "te": "trailers"}
    return b"".join(header(*field) for field in [*fields.items(), ("content-type", "application/grpc")])


GENERATE = path_of(OURS[0])
GOOD_BODY = pb.GenerateRequest.FromString(b"").SerializeToString()
MESSAGE_FRAMES = st.builds(
    lambda flag, length, body: struct.pack(">BI", flag, length) + body,
    st.sampled_from([0, 1, 2, 255]),
    st.sampled_from([0, 1, 5, 2**20, 2**32 - 1]),
    st.binary(max_size=20),
)
"""A message as gRPC writes it, with any flag for its compression and any length."""
PAYLOADS = st.binary(max_size=100) | st.just(call_headers(GENERATE)) | MESSAGE_FRAMES
FRAMES = st.one_of(
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 2**31 - 1]), PAYLOADS),
    st.just(frame(HEADERS, END_HEADERS, 1, call_headers(GENERATE))),
    st.builds(frame, st.just(DATA), st.sampled_from([0, END_STREAM]), st.just(1), MESSAGE_FRAMES),
    st.just(frame(RST_STREAM, 0, 1, b"\0\0\0\x08")),
)
HELLO = PREFACE + frame(SETTINGS, 0, 0, b"")
CONNECTIONS = st.one_of(
    st.binary(max_size=500),
    st.integers(0, len(PREFACE)).map(lambda end: PREFACE[:end]),
    st.binary(min_size=1, max_size=500).map(lambda garbage: HELLO + garbage),
    st.lists(FRAMES, max_size=6).map(lambda frames: HELLO + b"".join(frames)),
    st.lists(FRAMES, min_size=1, max_size=6).map(lambda frames: (HELLO + b"".join(frames))[:-3]),
    st.just(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    st.just(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
)


async def connect_and_send(server: FakeEngineServer, data: bytes) -> None:
    """Send bytes on a connection of their own, and wait until the server has ended it."""
    host, _, port = server.transport.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        writer.write_eof()
        while await within(reader.read(65536)):
            pass
    except (ConnectionError, BrokenPipeError):
        pass
    finally:
        writer.close()


def test_a_connection_of_random_bytes(vllm_config: VllmConfig) -> None:
    with Rig.run(vllm_config) as rig:

        @examples(300)
        @given(CONNECTIONS)
        def sent(data: bytes) -> None:
            rig.do(connect_and_send, rig.server, data)

        sent()


@pytest.fixture
async def held_open(server: FakeEngineServer) -> AsyncIterator[list[asyncio.StreamWriter]]:
    host, _, port = server.transport.address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    for data in (b"", PREFACE[:10], PREFACE, HELLO, HELLO + frame(HEADERS, 0, 1, call_headers(GENERATE)[:20])):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        await writer.drain()
        writers.append(writer)
    yield writers
    for writer in writers:
        writer.close()


async def test_connections_that_stand_still_hold_up_nobody(
    server: FakeEngineServer, held_open: list[asyncio.StreamWriter]
) -> None:
    assert len(held_open) == 5
    async with server.connect() as channel:
        await within(channel.channel_ready())
    await server.check_alive()


async def test_headers_without_end(server: FakeEngineServer) -> None:
    """Header blocks that go on and on are cut off, not gathered."""
    more = b"".join(frame(CONTINUATION, 0, 1, header(f"x-{number}", "y" * 100) * 100) for number in range(200))
    await connect_and_send(server, HELLO + frame(HEADERS, 0, 1, call_headers(GENERATE)) + more)
    await server.check_alive()


async def test_metadata_that_is_too_large_is_refused_and_the_connection_stays(server: FakeEngineServer) -> None:
    call = server.stub.GetEngineInfo(pb.GetEngineInfoRequest(), metadata=[("x-large", "y" * 100_000)])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await within(call)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.check_alive()
