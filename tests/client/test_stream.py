"""A stream's deltas, and its end: leaving a stream in any way must end the call on the server."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

import tokenwire
from tokenwire import AsyncClient, AsyncDeltaStream, FinishReason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2

Serve = Callable[..., Awaitable[str]]
Context = grpc.aio.ServicerContext[Any, Any]
LIMIT = 20.0


def chunk(*token_ids: int, **fields: Any) -> pb.GenerateStreamResponse:
    finish = fields.pop("finish_reason", generation_pb2.FINISH_REASON_UNSPECIFIED)
    output = generation_pb2.SequenceOutput(token_ids=token_ids, finish_reason=finish)
    return pb.GenerateStreamResponse(outputs=[output], **fields)


class Endless:
    """A handler that sends two chunks, then waits forever, and records when it is ended."""

    def __init__(self) -> None:
        self.started, self.ended = asyncio.Event(), asyncio.Event()

    async def stream(
        self, request: pb.GenerateStreamRequest, _context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.started.set()
        try:
            yield chunk(1, request_id=request.input.request_id)
            yield chunk(2)
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def test_deltas(serve: Serve) -> None:
    """FIELD_LOG S6."""

    async def handler(request: pb.GenerateStreamRequest, _context: Context) -> AsyncIterator[pb.GenerateStreamResponse]:
        yield chunk(1, request_id=request.input.request_id)
        yield chunk(2, 3)
        yield chunk(4, finish_reason=generation_pb2.FINISH_REASON_STOP, usage=generation_pb2.Usage(completion_tokens=4))

    async with AsyncClient(await serve(GenerateStream=handler)) as client:
        stream = client.stream([1], request_id="mine", timeout=LIMIT)
        deltas = [delta async for delta in stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
    assert stream.request_id == "mine"
    assert [delta.token_ids for delta in deltas] == [[1], [2, 3], [4]]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert [delta.usage for delta in deltas[:2]] == [None, None]
    assert deltas[2].usage == tokenwire.Usage(prompt_tokens=0, completion_tokens=4)


async def test_refusal_comes_with_the_first_read(serve: Serve) -> None:
    async def handler(_request: pb.GenerateStreamRequest, context: Context) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")

    async with AsyncClient(await serve(GenerateStream=handler)) as client:
        stream = client.stream([1], timeout=LIMIT)
        with pytest.raises(tokenwire.NotFoundError, match="no such model"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_failure_follows_the_deltas_before_it(serve: Serve) -> None:
    async def handler(_request: pb.GenerateStreamRequest, context: Context) -> AsyncIterator[pb.GenerateStreamResponse]:
        yield chunk(1)
        yield chunk(2)
        await context.abort(grpc.StatusCode.INTERNAL, "engine")

    async with AsyncClient(await serve(GenerateStream=handler)) as client:
        stream = client.stream([1], timeout=LIMIT)
        assert [(await anext(stream)).token_ids for _ in range(2)] == [[1], [2]]
        with pytest.raises(tokenwire.InternalError):
            await anext(stream)


async def collect(stream: AsyncDeltaStream) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def leave_with_block(client: AsyncClient, _handler: Endless) -> None:
    async with client.stream([1]) as stream:
        async for _ in stream:
            break


async def leave_block_unread(client: AsyncClient, handler: Endless) -> None:
    async with client.stream([1]):
        await handler.started.wait()


async def leave_block_by_exception(client: AsyncClient, _handler: Endless) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with client.stream([1]) as stream:
            async for _ in stream:
                raise ZeroDivisionError


async def leave_by_aclose(client: AsyncClient, _handler: Endless) -> None:
    stream = client.stream([1])
    async for _ in stream:
        break
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_break(client: AsyncClient, _handler: Endless) -> None:
    async for _ in client.stream([1]):
        break


async def leave_by_exception(client: AsyncClient, _handler: Endless) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async for _ in client.stream([1]):
            raise ZeroDivisionError


async def leave_by_dropping(client: AsyncClient, _handler: Endless) -> None:
    stream = client.stream([1])
    await anext(stream)
    del stream


async def leave_by_dropping_unread(client: AsyncClient, handler: Endless) -> None:
    stream = client.stream([1])
    await handler.started.wait()
    del stream


async def leave_as_garbage(client: AsyncClient, _handler: Endless) -> None:
    cycle: list[Any] = [client.stream([1])]
    cycle.append(cycle)
    await anext(cycle[0])
    del cycle
    gc.collect()


async def leave_by_task_cancel(client: AsyncClient, _handler: Endless) -> None:
    reading = asyncio.Event()

    async def read() -> None:
        async for delta in client.stream([1]):
            if delta.token_ids == [2]:
                reading.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(reading.wait(), LIMIT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout_of_the_reader(client: AsyncClient, _handler: Endless) -> None:
    stream = client.stream([1])
    await anext(stream)
    await anext(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.05)


async def leave_by_deadline(client: AsyncClient, handler: Endless) -> None:
    timeout = 0.1
    while not handler.started.is_set():  # on a slow machine the deadline comes before the call does
        timeout *= 2
        with pytest.raises(tokenwire.DeadlineExceededError):
            await collect(client.stream([1], timeout=timeout))


@pytest.mark.parametrize(
    "leave",
    [
        leave_with_block,
        leave_block_unread,
        leave_block_by_exception,
        leave_by_aclose,
        leave_by_break,
        leave_by_exception,
        leave_by_dropping,
        leave_by_dropping_unread,
        leave_as_garbage,
        leave_by_task_cancel,
        leave_by_timeout_of_the_reader,
        leave_by_deadline,
    ],
    ids=lambda leave: leave.__name__,
)
async def test_leaving_the_stream_ends_the_call(
    serve: Serve, leave: Callable[[AsyncClient, Endless], Awaitable[None]]
) -> None:
    """FIELD_LOG 6."""
    handler = Endless()
    # The client stays open: closing its channel would end the call too. With grpc.aio's own iterator the event is
    # never set after a break or a drop.
    async with AsyncClient(await serve(GenerateStream=handler.stream)) as client:
        async with asyncio.timeout(LIMIT):
            await leave(client, handler)
            await handler.ended.wait()
            # The connection can be used for the next call.
            again = client.stream([1])
            assert (await anext(again)).token_ids == [1]
            await again.aclose()


async def test_closing_in_one_task_ends_the_iteration_in_another(serve: Serve) -> None:
    handler = Endless()
    async with AsyncClient(await serve(GenerateStream=handler.stream)) as client:
        stream = client.stream([1])
        reading = asyncio.Event()

        async def read(stream: AsyncDeltaStream) -> list[int]:
            seen = []
            async for delta in stream:
                seen += delta.token_ids
                if len(seen) == 2:
                    reading.set()
            return seen

        task = asyncio.create_task(read(stream))
        async with asyncio.timeout(LIMIT):
            await reading.wait()
            await asyncio.sleep(0)
            await stream.aclose()
            assert await task == [1, 2]
            await handler.ended.wait()


async def test_closing_the_client_is_an_error_for_the_reader(serve: Serve) -> None:
    client = AsyncClient(await serve(GenerateStream=Endless().stream))
    stream = client.stream([1])
    async with asyncio.timeout(LIMIT):
        await anext(stream)
        await anext(stream)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(tokenwire.ClientClosedError):
            await task


async def test_lost_server_is_unreachable() -> None:
    handler = Endless()
    server = grpc.aio.server()
    method = grpc.unary_stream_rpc_method_handler(
        handler.stream, pb.GenerateStreamRequest.FromString, pb.GenerateStreamResponse.SerializeToString
    )
    service = pb.DESCRIPTOR.services_by_name["EngineService"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"GenerateStream": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client, asyncio.timeout(LIMIT):
        stream = client.stream([1])
        await anext(stream)
        await anext(stream)
        await server.stop(None)
        with pytest.raises((tokenwire.UnreachableError, tokenwire.CallCancelledError)):
            await anext(stream)


async def test_a_malformed_message_is_an_internal_error(serve: Serve) -> None:
    """FAULTS D9."""
    mask = generation_pb2.SamplingMask(counts=[1], token_ids=b"123")
    output = generation_pb2.SequenceOutput(token_ids=[1], sampling_mask=mask)
    ended = asyncio.Event()

    async def stream(_request: Any, _context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        try:
            yield pb.GenerateStreamResponse(outputs=[output])
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def generate(_request: Any, _context: Any) -> pb.GenerateResponse:
        return pb.GenerateResponse(outputs=[output])

    target = await serve(Generate=generate, GenerateStream=stream)
    async with AsyncClient(target) as client, asyncio.timeout(LIMIT):
        deltas = client.stream([1])
        with pytest.raises(tokenwire.InternalError, match="breaks the contract"):
            await anext(deltas)
        assert await anext(deltas, None) is None
        await ended.wait()
        with pytest.raises(tokenwire.InternalError, match="breaks the contract"):
            await client.generate([1])
