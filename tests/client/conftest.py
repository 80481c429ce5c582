"""Real servers whose handlers are functions of a test: `serve(Generate=...)` returns the address."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import message_factory
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from tokenwire.v1 import engine_service_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["EngineService"]


_KINDS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _method_handler(
    request_type: Any, response_type: Any, function: Callable[..., Any], *, streams: tuple[bool, bool]
) -> Any:
    make = _KINDS[streams]
    return make(function, request_type.FromString, response_type.SerializeToString)


def _handlers(methods: dict[str, Callable[..., Any]]) -> list[grpc.GenericRpcHandler]:
    engine, health = {}, {}
    for name, function in methods.items():
        if name in ("Check", "Watch"):
            health[name] = _method_handler(StringValue, Int32Value, function, streams=(False, name == "Watch"))
        else:
            method = SERVICE.methods_by_name[name]
            request_type, response_type = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
            streams = (method.client_streaming, method.server_streaming)
            engine[name] = _method_handler(request_type, response_type, function, streams=streams)
    return [
        grpc.method_handlers_generic_handler(SERVICE.full_name, engine),
        grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
    ]


@pytest_asyncio.fixture
async def nothing_pending() -> AsyncIterator[None]:
    """Fail the test if it leaves a task behind or loses an exception."""
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert complaints == []


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Start servers in the test's event loop."""
    servers: list[grpc.aio.Server] = []

    async def start(address: str = "127.0.0.1:0", **methods: Callable[..., Any]) -> str:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)])
        server.add_generic_rpc_handlers(_handlers(methods))
        port = server.add_insecure_port(address)
        await server.start()
        servers.append(server)
        return address if address.startswith("unix:") else f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


@pytest.fixture
def serve_threads() -> Iterator[Callable[..., str]]:
    """Start servers whose handlers run in threads, for blocking callers."""
    servers: list[tuple[grpc.Server, ThreadPoolExecutor]] = []

    def start(**methods: Callable[..., Any]) -> str:
        pool = ThreadPoolExecutor(4)
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(_handlers(methods))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append((server, pool))
        return f"127.0.0.1:{port}"

    yield start
    for server, pool in servers:
        assert server.stop(None).wait(10)
        pool.shutdown()
