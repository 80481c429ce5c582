import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

import tokenwire
from tokenwire import AsyncClient, HealthStatus

Serve = Callable[..., Awaitable[str]]
Context = grpc.aio.ServicerContext[Any, Any]
LIMIT = 20.0
SERVING, NOT_SERVING = Int32Value(value=1), Int32Value(value=2)


def test_messages_are_those_of_the_health_service() -> None:
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
    request = health_pb2.HealthCheckRequest(service="tokenwire.v1.EngineService")
    assert StringValue(value=request.service).SerializeToString() == request.SerializeToString()
    for name, value in health_pb2.HealthCheckResponse.ServingStatus.items():
        response = Int32Value.FromString(health_pb2.HealthCheckResponse(status=value).SerializeToString())
        assert tokenwire._health._status(response) is HealthStatus[name]


@pytest.mark.parametrize(("value", "status"), [(1, "SERVING"), (2, "NOT_SERVING"), (0, "UNKNOWN"), (99, "UNKNOWN")])
async def test_health(serve: Serve, value: int, status: str) -> None:
    async def check(request: StringValue, _context: Context) -> Int32Value:
        assert request.value == "a.Service"
        return Int32Value(value=value)

    async with AsyncClient(await serve(Check=check)) as client:
        assert await client.health("a.Service", timeout=LIMIT) is HealthStatus[status]


async def test_unknown_service(serve: Serve) -> None:
    async def check(_request: StringValue, context: Context) -> Int32Value:
        await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")

    async with AsyncClient(await serve(Check=check)) as client:
        assert await client.health("x", timeout=LIMIT) is HealthStatus.SERVICE_UNKNOWN


async def test_wait_ready_through_loading(serve: Serve) -> None:
    loading, loaded, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def watch(_request: StringValue, _context: Context) -> AsyncIterator[Int32Value]:
        try:
            yield NOT_SERVING
            loading.set()
            await loaded.wait()
            yield SERVING
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncClient(await serve(Watch=watch)) as client, asyncio.timeout(LIMIT):
        ready = asyncio.create_task(client.wait_ready())
        await loading.wait()
        assert not ready.done()
        loaded.set()
        await ready
        await ended.wait()  # it leaves no watch behind


async def test_wait_ready_through_refusals_and_restarts(serve: Serve) -> None:
    calls = 0

    async def watch(_request: StringValue, context: Context) -> AsyncIterator[Int32Value]:
        nonlocal calls
        calls += 1
        if calls == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        if calls == 2:
            yield NOT_SERVING
            return
        yield SERVING

    async with AsyncClient(await serve(Watch=watch)) as client:
        await client.wait_ready(timeout=LIMIT)
    assert calls == 3


async def test_wait_ready_for_a_server_that_does_not_listen_yet(serve: Serve) -> None:
    async def watch(_request: StringValue, _context: Context) -> AsyncIterator[Int32Value]:
        yield SERVING

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{bound.getsockname()[1]}"
        async with AsyncClient(target) as client:
            ready = asyncio.create_task(client.wait_ready(timeout=LIMIT))
            with pytest.raises(tokenwire.UnreachableError):
                await client.engine_info()
            assert not ready.done()
            bound.close()
            await serve(target, Watch=watch)
            await ready


async def test_wait_ready_says_what_it_waited_for(serve: Serve) -> None:
    async def watch(_request: StringValue, _context: Context) -> AsyncIterator[Int32Value]:
        yield NOT_SERVING
        await asyncio.Event().wait()

    async with AsyncClient(await serve(Watch=watch)) as client:
        with pytest.raises(tokenwire.DeadlineExceededError, match=r"not ready after 0\.3 s: its status is NOT_SERVING"):
            await client.wait_ready(timeout=0.3)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        async with AsyncClient(f"127.0.0.1:{bound.getsockname()[1]}") as client:
            with pytest.raises(tokenwire.DeadlineExceededError, match="refused"):
                await client.wait_ready(timeout=0.3)


async def test_wait_ready_does_not_wait_for_what_will_not_come(serve: Serve) -> None:
    async def watch(_request: StringValue, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")

    async with AsyncClient(await serve(Watch=watch)) as client:
        with pytest.raises(tokenwire.UnauthenticatedError):
            await client.wait_ready(timeout=LIMIT)
    async with AsyncClient(await serve()) as client:
        with pytest.raises(tokenwire.UnimplementedError):
            await client.wait_ready(timeout=LIMIT)


async def test_cancelled_wait_is_cancelled(serve: Serve) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def watch(_request: StringValue, _context: Context) -> AsyncIterator[Int32Value]:
        started.set()
        try:
            yield NOT_SERVING
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncClient(await serve(Watch=watch)) as client, asyncio.timeout(LIMIT):
        task = asyncio.create_task(client.wait_ready())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ended.wait()


async def test_watch_health(serve: Serve) -> None:
    """FAULTS F8."""
    change, ended = asyncio.Event(), asyncio.Event()

    async def watch(request: StringValue, _context: Context) -> AsyncIterator[Int32Value]:
        assert request.value == "a.Service"
        try:
            yield SERVING
            await change.wait()
            yield NOT_SERVING
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncClient(await serve(Watch=watch)) as client, asyncio.timeout(LIMIT):
        async with client.watch_health("a.Service") as statuses:
            assert await anext(statuses) is HealthStatus.SERVING
            change.set()
            assert await anext(statuses) is HealthStatus.NOT_SERVING
            assert not ended.is_set()
        await ended.wait()
        assert await anext(statuses, None) is None


async def test_a_watch_ends_with_the_connection() -> None:
    """FAULTS F8."""

    async def watch(_request: StringValue, _context: Context) -> AsyncIterator[bytes]:
        yield SERVING.SerializeToString()
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handlers: Any = {"Watch": grpc.unary_stream_rpc_method_handler(watch)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client, asyncio.timeout(LIMIT):
        statuses = client.watch_health()
        assert await anext(statuses) is HealthStatus.SERVING
        reading = asyncio.create_task(anext(statuses))
        await server.stop(None)
        with pytest.raises(tokenwire.TokenwireError):
            await reading
        with pytest.raises(tokenwire.UnreachableError):
            await anext(client.watch_health())
