"""The step view of a Multiplex call."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

import tokenwire
from harness.multiplex import ABORT, MultiplexPeer, finish
from tokenwire import AsyncClient, FinishReason, MultiplexSteps, SamplingParams
from tokenwire._multiplex import call
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import error_pb2, generation_pb2, logprobs_pb2, multiplex_pb2

Serve = Callable[..., Awaitable[str]]
LIMIT = 10.0

pytestmark = pytest.mark.usefixtures("nothing_pending")


def logprob_columns(**columns: Any) -> multiplex_pb2.MultiplexLogprobs:
    return multiplex_pb2.MultiplexLogprobs(logprobs=[-1], ranks=[1], **columns)


class Opened(NamedTuple):
    peer: MultiplexPeer
    steps: MultiplexSteps
    client: AsyncClient


@asynccontextmanager
async def opened(serve: Serve, **options: Any) -> AsyncIterator[Opened]:
    peer = MultiplexPeer()
    address = await serve(Multiplex=peer.multiplex)
    async with asyncio.timeout(LIMIT), AsyncClient(address) as client, client.multiplex_steps(**options) as steps:
        yield Opened(peer, steps, client)


async def test_columns_are_those_of_the_message(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        handles = [steps.submit([1], request_id=name) for name in "abc"]
        assert handles == [1, 2, 3]
        accepted = [multiplex_pb2.MultiplexAccepted(handle=1, request_id="a")]
        peer.step(handles=[1, 2], token_ids=[10, 20], accepted=accepted)
        step = await anext(steps)
        assert (step.handles, step.indexes, step.token_counts, step.token_ids) == ([1, 2], [], [], [10, 20])
        assert step.accepted == [tokenwire.MultiplexAccepted(1, "a")]
        assert (step.finished, step.rejected, step.failed, step.logprobs) == ([], [], [], None)
        assert list(step.runs()) == [(1, 0, [10], None), (2, 0, [20], None)]
        peer.step(
            handles=[1, 2, 1], indexes=[0, 1, 0], token_counts=[2, 1, 0], token_ids=[1, 2, 3], finished=[finish(1)]
        )
        step = await anext(steps)
        assert list(step.runs()) == [(1, 0, [1, 2], None), (2, 1, [3], None), (1, 0, [], None)]
        assert [(end.handle, end.finish_reason, end.last) for end in step.finished] == [(1, FinishReason.STOP, True)]


async def test_logprob_columns(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        steps.submit([1], SamplingParams(logprobs=1))
        columns: dict[str, Any] = {"top_ks": [1], "logprobs": [-1, -2], "ranks": [1, 2], "top_token_ids": [8, 9]}
        message = multiplex_pb2.MultiplexLogprobs(entries=[1], top_logprobs=[-3, -4], **columns)
        peer.step(handles=[2, 1], token_counts=[1, 2], token_ids=[7, 8, 9], logprobs=message)
        step = await anext(steps)
        assert step.logprobs == tokenwire.MultiplexLogprobs(entries=[1], top_logprobs=[-3, -4], **columns)
        logprobs = tokenwire.Logprobs(
            logprobs=[-1, -2], ranks=[1, 2], top_k=1, top_token_ids=[8, 9], top_logprobs=[-3, -4]
        )
        assert list(step.runs()) == [(2, 0, [7], None), (1, 0, [8, 9], logprobs)]


async def test_prompt_logprobs_come_part_by_part(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        steps.submit([1, 2], SamplingParams(prompt_logprobs=0))
        part = multiplex_pb2.MultiplexPromptLogprobs(
            handle=1, prompt_logprobs=logprobs_pb2.PromptLogprobs(offset=1, logprobs=[-2], ranks=[3])
        )
        peer.answer(pb.MultiplexResponse(prompt_logprobs=part))
        step = await anext(steps)
        assert step.handles == []
        assert step.prompt_logprobs is not None
        assert step.prompt_logprobs.handle == 1
        assert (step.prompt_logprobs.prompt_logprobs.offset, step.prompt_logprobs.prompt_logprobs.ranks) == (1, [3])


async def test_refusals(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        for _ in range(3):
            steps.submit([1])
        full = error_pb2.ErrorStatus(code=14, reason="QUEUE_FULL", retry_delay=Duration(seconds=1))
        unknown = error_pb2.ErrorStatus(code=5, reason="UNKNOWN_HANDLE")
        dead = error_pb2.ErrorStatus(code=14, reason="ENGINE_DEAD")
        rejected = [
            multiplex_pb2.MultiplexRejection(handle=handle, status=status)
            for handle, status in ((1, full), (3, unknown))
        ]
        peer.step(rejected=rejected, failed=[multiplex_pb2.MultiplexFailure(handle=2, status=dead)])
        step = await anext(steps)
        assert [(refused.handle, type(refused.status)) for refused in step.rejected] == [(1, tokenwire.OverloadedError)]
        assert [(failure.handle, type(failure.status)) for failure in step.failed] == [(2, tokenwire.EngineDeadError)]
        # Only handles of ended requests are free, after the next step has been requested.
        assert steps.submit([1]) == 4
        peer.step(handles=[3], token_ids=[1])
        await anext(steps)
        assert {steps.submit([1]), steps.submit([1]), steps.submit([1])} == {1, 2, 5}


async def test_aborts_go_out_together_after_their_submits(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        handles = [steps.submit([1]) for _ in range(4)]
        steps.abort(handles[:2])
        steps.abort([handles[2], 99])
        steps.abort([])
        for _ in range(4):
            await peer.submit()
        assert await peer.abort() == [1, 2, 3]
        peer.finish(1)
        await anext(steps)
        steps.abort([1, 4])
        assert await peer.abort() == [4]


async def test_done_submitting_ends_the_iteration_after_the_last_request(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        handle = steps.submit([1])
        steps.done_submitting()
        with pytest.raises(tokenwire.ClientClosedError):
            steps.submit([1])
        await peer.submit()
        steps.abort([handle])
        assert await peer.abort() == [handle]
        peer.step(handles=[1], token_ids=[4], finished=[finish(1, ABORT)])

        async def end() -> None:
            await peer.half_close()
            peer.end()

        ending = asyncio.create_task(end())
        assert [step.token_ids async for step in steps] == [[4]]
        assert await anext(steps, None) is None
        await ending


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, tokenwire.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, tokenwire.UnimplementedError),
        (grpc.StatusCode.UNAVAILABLE, tokenwire.UnreachableError),
    ],
)
async def test_the_end_of_the_call_is_raised_once(
    serve: Serve, code: grpc.StatusCode | None, expected: type[Exception]
) -> None:
    async with opened(serve) as (peer, steps, _):
        steps.submit([1])
        await peer.submit()
        peer.tokens(1, 4)
        if code is None:
            peer.end()
        else:
            peer.fail(code, "no")
        assert (await anext(steps)).token_ids == [4]
        with pytest.raises(expected):
            await anext(steps)
        assert await anext(steps, None) is None
        with pytest.raises(expected):
            steps.submit([1])
        steps.abort([1])


BROKEN: list[dict[str, Any]] = [
    {"handles": [1, 2], "token_ids": [1]},
    {"handles": [1], "token_counts": [2], "token_ids": [1]},
    {"handles": [1], "token_counts": [1, 0], "token_ids": [1]},
    {"handles": [1], "indexes": [0, 1], "token_ids": [1]},
    {"handles": [1], "token_ids": [1], "logprobs": multiplex_pb2.MultiplexLogprobs(logprobs=[1], ranks=[1])},
    {"handles": [1], "token_ids": [1], "logprobs": multiplex_pb2.MultiplexLogprobs(entries=[1], top_ks=[0])},
]


@pytest.mark.parametrize("fields", BROKEN, ids=range(len(BROKEN)))
async def test_columns_that_do_not_fit_end_the_call(serve: Serve, fields: dict[str, Any]) -> None:
    async with opened(serve) as (peer, steps, _):
        peer.step(**fields)
        with pytest.raises(tokenwire.InternalError, match="breaks the contract"):
            await anext(steps)
        await peer.ended.wait()


async def test_cancelling_the_reader_ends_the_call(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        steps.submit([1])
        task = asyncio.ensure_future(anext(steps))
        await peer.submit()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await peer.ended.wait()
        with pytest.raises(tokenwire.ClientClosedError):
            steps.submit([1])


async def test_closing_the_client_is_an_error_for_the_reader(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, client):
        task = asyncio.ensure_future(anext(steps))
        await peer.started.wait()
        await client.close()
        with pytest.raises(tokenwire.ClientClosedError):
            await task


async def test_leaving_the_block_ends_the_call(serve: Serve) -> None:
    async with opened(serve) as (peer, steps, _):
        steps.submit([1])
        await peer.submit()
        peer.tokens(1, 1)
        await anext(steps)
    await asyncio.wait_for(peer.ended.wait(), LIMIT)
    assert await anext(steps, None) is None


async def test_use_outside_of_the_block(serve: Serve) -> None:
    async with opened(serve) as (_, steps, client):
        outside = client.multiplex_steps()
        with pytest.raises(tokenwire.ClientClosedError):
            outside.submit([1])
        with pytest.raises(tokenwire.ClientClosedError):
            await anext(outside)
        with pytest.raises(RuntimeError):
            await steps.__aenter__()


async def test_aborts_are_a_set_in_messages_of_limited_length(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS D1."""
    # The contract's limit for one message.
    assert call._MAX_ABORT_HANDLES == 10_000
    monkeypatch.setattr(call, "_MAX_ABORT_HANDLES", 100)
    async with opened(serve) as (peer, steps, _):
        handles = [steps.submit([1]) for _ in range(201)]
        steps.abort([*handles, *handles])
        steps.abort(handles)
        steps.abort([handles[0]])
        for _ in handles:
            await peer.submit()
        messages = [await peer.abort() for _ in range(3)]
        assert [len(message) for message in messages] == [100, 100, 1]
        assert [handle for message in messages for handle in message] == handles
        # A handle's next request can be aborted as well.
        peer.finish(1)
        await anext(steps)
        peer.finish(2)
        await anext(steps)
        again = steps.submit([1])
        steps.abort([again])
        assert (await peer.submit()).handle == again
        assert await peer.abort() == [again]


@pytest.mark.parametrize("limit", [200, 2_000])
async def test_aborts_fit_into_the_messages_that_may_be_sent(serve: Serve, limit: int) -> None:
    """FAULTS D1."""
    peer = MultiplexPeer()
    address = await serve(Multiplex=peer.multiplex)
    async with (
        asyncio.timeout(LIMIT),
        AsyncClient(address, max_send_message_bytes=limit) as client,
        client.multiplex_steps() as steps,
    ):
        handles = [steps.submit([1], request_id=str(i)) for i in range(1_000)]
        steps.abort(handles)
        for _ in handles:
            await peer.submit()
        aborted: list[int] = []
        while len(aborted) < len(handles):
            aborted += await peer.abort()
        assert aborted == handles


async def test_the_size_of_a_submit_includes_its_handle(serve: Serve) -> None:
    """FAULTS D4."""
    peer = MultiplexPeer()
    address = await serve(Multiplex=peer.multiplex)
    async with (
        asyncio.timeout(LIMIT),
        AsyncClient(address, max_send_message_bytes=512) as client,
        client.multiplex_steps() as steps,
    ):
        accepted = 0
        for length in range(440, 520):
            try:
                steps.submit([1] * length, request_id="r")
            except tokenwire.MessageTooLargeError:
                continue
            accepted += 1
        assert 0 < accepted < 80
        sizes = [(await peer.submit()).ByteSize() for _ in range(accepted)]
        assert max(sizes) + 3 == 512
        # None of the refused ones has used a handle up.
        assert steps.submit([1]) == accepted + 1
        peer.tokens(1, 5)
        assert (await anext(steps)).token_ids == [5]


async def end_with_status(peer: MultiplexPeer, _opened: Opened) -> None:
    peer.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")


async def end_by_closing_the_client(_peer: MultiplexPeer, opened: Opened) -> None:
    await opened.client.close()


async def end_by_leaving_the_block(_peer: MultiplexPeer, opened: Opened) -> None:
    await opened.steps.__aexit__(None, None, None)


async def end_regularly(peer: MultiplexPeer, opened: Opened) -> None:
    opened.steps.done_submitting()
    await peer.half_close()
    peer.end()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (end_with_status, tokenwire.ResourceExhaustedError),
        (end_by_closing_the_client, tokenwire.ClientClosedError),
        (end_by_leaving_the_block, None),
        (end_regularly, None),
    ],
    ids=lambda value: getattr(value, "__name__", "returns"),
)
async def test_who_waits_for_the_end_learns_of_it_without_reading(
    serve: Serve, how: Callable[[MultiplexPeer, Opened], Any], expected: type[Exception] | None
) -> None:
    """FAULTS F8."""
    async with opened(serve) as all_:
        peer, steps, _ = all_
        await peer.started.wait()
        waiting = [asyncio.create_task(steps.wait_closed()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await how(peer, all_)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [expected or type(None)] * 2
        if expected is tokenwire.ResourceExhaustedError:
            # The reader gets the same error.
            with pytest.raises(expected):
                await anext(steps)
            with pytest.raises(expected):
                await steps.wait_closed()


async def test_there_is_no_end_to_wait_for_before_the_block(serve: Serve) -> None:
    """FAULTS F8."""
    async with AsyncClient(await serve()) as client:
        with pytest.raises(tokenwire.ClientClosedError):
            await client.multiplex_steps().wait_closed()


@pytest.mark.parametrize(
    "fields",
    [
        {"finished": [finish(1, sampling_mask=generation_pb2.SamplingMask(counts=[1], token_ids=b"123"))]},
        {"finished": [finish(1, sampling_mask=generation_pb2.SamplingMask(counts=[2], token_ids=b"1234"))]},
        {"handles": [1, 1], "token_ids": [1]},
        {
            "handles": [1],
            "token_counts": [1],
            "token_ids": [1],
            "logprobs": logprob_columns(entries=[5, 0], top_ks=[0, 0]),
        },
        {"handles": [1], "token_ids": [1], "logprobs": logprob_columns(entries=[0], top_ks=[])},
    ],
    ids=["mask_bytes", "mask_counts", "tokens", "entries", "top_ks"],
)
async def test_a_malformed_step_is_an_internal_error(serve: Serve, fields: dict[str, Any]) -> None:
    """FAULTS D9."""
    async with opened(serve) as (peer, steps, _):
        steps.submit([1])
        peer.step(**fields)
        with pytest.raises(tokenwire.InternalError, match="breaks the contract"):
            await anext(steps)
