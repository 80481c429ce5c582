"""Abort, cancel, deadline: the caller gets what there is, and the engine lets go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tokenwire import (
    AbortOutcome,
    AsyncClient,
    AsyncDeltaStream,
    DeadlineExceededError,
    FinishReason,
    GenerateResult,
    SamplingParams,
)

# Would keep its place in the engine for a minute or more.
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1900)
PLACES = 4  # --max-num-seqs


async def read(stream: AsyncDeltaStream, count: int) -> list[int]:
    """Read at least `count` tokens."""
    tokens: list[int] = []
    while len(tokens) < count:
        delta = await anext(stream)
        tokens += delta.token_ids
        assert delta.finish_reason is None
    return tokens


async def outcomes(client: AsyncClient, *request_ids: str) -> list[AbortOutcome]:
    return [result.outcome for result in await client.abort(request_ids)]


@contextlib.asynccontextmanager
async def full_engine(client: AsyncClient, prompt: list[int], free: int) -> AsyncIterator[list[str]]:
    """Fill all places of the engine but some with requests that run; ends them by an abort that finds them running."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(client.stream(prompt, ENDLESS)) for _ in range(PLACES - free)]
        for stream in streams:
            await read(stream, 1)
        ids = [stream.request_id for stream in streams]
        yield ids
        assert await outcomes(client, *ids) == [AbortOutcome.ABORTED] * len(ids)


async def leave_block(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    async with client.stream(prompt, ENDLESS, request_id=request_id) as stream:
        async for _ in stream:
            break


async def leave_loop(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    async for _ in client.stream(prompt, ENDLESS, request_id=request_id):
        break


async def raise_in_block(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    async def fail() -> None:
        async with client.stream(prompt, ENDLESS, request_id=request_id) as stream:
            await read(stream, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def cancel_reader(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    reading = asyncio.Event()

    async def consume() -> None:
        async with client.stream(prompt, ENDLESS, request_id=request_id) as stream:
            async for _ in stream:
                reading.set()

    task = asyncio.create_task(consume())
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_unary(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    # asyncio's own timeout: the task is cancelled, the server knows of no deadline.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await client.generate(prompt, ENDLESS, request_id=request_id)


async def stream_deadline(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    with pytest.raises(DeadlineExceededError):
        async with client.stream(prompt, ENDLESS, request_id=request_id, timeout=1) as stream:
            await read(stream, 10_000)


async def unary_deadline(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    with pytest.raises(DeadlineExceededError):
        await client.generate(prompt, ENDLESS, request_id=request_id, timeout=1)


async def close_client(client: AsyncClient, prompt: list[int], request_id: str) -> None:
    async with AsyncClient(client.target) as other:
        await read(other.stream(prompt, ENDLESS, request_id=request_id), 1)


Leave = Callable[[AsyncClient, list[int], str], Awaitable[None]]


@pytest.mark.parametrize(
    "leave",
    [
        leave_block,
        leave_loop,
        raise_in_block,
        cancel_reader,
        cancel_unary,
        stream_deadline,
        unary_deadline,
        close_client,
    ],
)
async def test_a_call_that_is_left_gives_its_place_in_the_engine_free(
    client: AsyncClient, prompt: list[int], leave: Leave
) -> None:
    """The engine's last place goes to a new request while the requests in the other places still run.

    They and the request that was left would all need a minute to end by themselves.
    """
    async with full_engine(client, prompt, free=1):
        await leave(client, prompt, "left")
        result = await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2), timeout=60)
        assert len(result.token_ids) == 2
        assert await outcomes(client, "left") == [AbortOutcome.ALREADY_FINISHED]


async def test_a_queued_call_that_is_left_never_runs(client: AsyncClient, prompt: list[int]) -> None:
    async with full_engine(client, prompt, free=0) as running:
        queued = client.stream(prompt, ENDLESS, request_id="queued")
        waiting = asyncio.create_task(anext(queued))
        behind = asyncio.create_task(client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), timeout=60))
        # A step later both are in the queue, and no place is free.
        async with client.stream(prompt, ENDLESS, timeout=1) as stream:
            with pytest.raises(DeadlineExceededError):
                await anext(stream)
        assert not waiting.done()
        assert not behind.done()
        await queued.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting
        # One place becomes free: it goes to the request behind the one that was left.
        first, *_ = running
        assert await outcomes(client, first) == [AbortOutcome.ABORTED]
        assert len((await behind).token_ids) == 1
        assert await outcomes(client, "queued") == [AbortOutcome.ALREADY_FINISHED]


async def running_unary(
    client: AsyncClient, prompt: list[int], params: SamplingParams, request_id: str
) -> "asyncio.Task[GenerateResult]":
    """Start a unary call, and return when it has tokens: a request that started after it has some."""
    task = asyncio.create_task(client.generate(prompt, params, request_id=request_id))
    async with client.stream(prompt, ENDLESS) as witness:
        await read(witness, 8)
    assert not task.done()
    return task


async def test_abort_returns_the_partial_tokens_to_a_waiting_call(client: AsyncClient, prompt: list[int]) -> None:
    task = await running_unary(client, prompt, ENDLESS, "partial")
    assert await outcomes(client, "partial") == [AbortOutcome.ABORTED]
    result = await task
    assert result.finish_reason is FinishReason.ABORT
    tokens = result.token_ids
    whole = await client.generate(
        prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=len(tokens)), request_id="partial"
    )
    assert tokens
    assert result.usage.completion_tokens == len(tokens)
    # The other requests in the batch may tip a close choice late in the text, but not in its first words.
    assert tokens[:4] == whole.token_ids[:4]


async def test_abort_ends_all_sequences_of_a_request(client: AsyncClient, prompt: list[int]) -> None:
    params = SamplingParams(n=3, temperature=1.0, ignore_eos=True, max_tokens=1900, logprobs=1)
    task = await running_unary(client, prompt, params, "three")
    assert await outcomes(client, "three") == [AbortOutcome.ABORTED]
    result = await task
    assert [output.finish_reason for output in result.outputs] == [FinishReason.ABORT] * 3
    for output in result.outputs:
        assert output.logprobs is not None
        assert len(output.token_ids) == len(output.logprobs.logprobs) > 0


async def test_abort_ends_a_stream_from_another_connection(client: AsyncClient, prompt: list[int]) -> None:
    async with client.stream(prompt, ENDLESS) as stream:
        await read(stream, 3)
        async with AsyncClient(client.target) as other:
            assert await outcomes(other, stream.request_id) == [AbortOutcome.ABORTED]
        rest = [delta async for delta in stream]
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert rest[-1].usage is not None


async def test_abort_says_what_became_of_each_id(client: AsyncClient, prompt: list[int]) -> None:
    await client.generate(prompt, SamplingParams(max_tokens=1), request_id="done")
    async with client.stream(prompt, ENDLESS, request_id="live") as stream:
        await read(stream, 1)
        ids = ["live", "done", "unheard-of", "liv", "live"]
        assert await outcomes(client, *ids) == [
            AbortOutcome.ABORTED,
            AbortOutcome.ALREADY_FINISHED,
            AbortOutcome.NOT_FOUND,
            AbortOutcome.NOT_FOUND,
            AbortOutcome.ABORTED,
        ]


async def test_an_aborted_id_may_be_used_again_at_once(client: AsyncClient, prompt: list[int]) -> None:
    for _ in range(3):
        async with client.stream(prompt, ENDLESS, request_id="again") as stream:
            await read(stream, 1)
            assert await outcomes(client, "again") == [AbortOutcome.ABORTED]
            result = await client.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True), request_id="again")
            assert (len(result.token_ids), result.finish_reason) == (2, FinishReason.LENGTH)


async def test_max_time_ends_with_what_there_is(client: AsyncClient, prompt: list[int]) -> None:
    result = await client.generate(prompt, ENDLESS, max_time=1.5)
    assert result.finish_reason is FinishReason.TIME_LIMIT
    assert 0 < len(result.token_ids) < 1900
