"""Typed streams on one Multiplex call: what each returns, and that none hangs, leaks or affects another."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

import tokenwire
from harness.multiplex import ABORT, MultiplexPeer, finish
from tokenwire import AsyncClient, FinishReason, Multiplex, MultiplexedStream, SamplingParams
from tokenwire._multiplex import call
from tokenwire._multiplex.handles import Handles
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import error_pb2, generation_pb2, logprobs_pb2, multiplex_pb2

Serve = Callable[..., Awaitable[str]]
LIMIT = 10.0

pytestmark = pytest.mark.usefixtures("nothing_pending")


class Opened(NamedTuple):
    peer: MultiplexPeer
    mux: Multiplex
    client: AsyncClient


@asynccontextmanager
async def opened(serve: Serve, **options: Any) -> AsyncIterator[Opened]:
    peer = MultiplexPeer()
    address = await serve(Multiplex=peer.multiplex)
    async with asyncio.timeout(LIMIT), AsyncClient(address) as client, client.multiplex(**options) as mux:
        yield Opened(peer, mux, client)


async def collect(stream: MultiplexedStream) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that has no event. The timeout of `opened` bounds the wait."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def turns() -> None:
    """Let the other tasks run until they wait."""
    for _ in range(3):
        await asyncio.sleep(0)


def is_free(mux: Multiplex, handle: int) -> bool:
    return handle in mux._call._handles._free


def error_status(code: grpc.StatusCode, reason: str, **fields: Any) -> error_pb2.ErrorStatus:
    return error_pb2.ErrorStatus(code=code.value[0], reason=reason, message="no", **fields)


async def test_deltas_of_several_requests(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        params = SamplingParams(max_tokens=3)
        a, b = (mux.submit([i], params, request_id=name, return_prompt_token_ids=True) for i, name in enumerate("ab"))
        submits = [await peer.submit() for _ in range(2)]
        assert [submit.handle for submit in submits] == [a.handle, b.handle] == [1, 2]
        assert [submit.input.request_id for submit in submits] == [a.request_id, b.request_id] == ["a", "b"]
        assert submits[0].input.sampling_params.max_tokens == 3
        accepted = [multiplex_pb2.MultiplexAccepted(handle=1, request_id="a")]
        peer.step(handles=[1, 2], token_ids=[10, 20], accepted=accepted)
        first = await anext(a)
        assert (first.request_id, first.token_ids, first.finish_reason) == ("a", [10], None)
        assert first.prompt_token_ids == [0]
        # Several entries of one handle in a step, and a finish after them.
        peer.step(handles=[1, 2, 1], token_counts=[1, 2, 2], token_ids=[11, 21, 22, 12, 13], finished=[finish(1)])
        last = await anext(a)
        assert (last.token_ids, last.finish_reason) == ([11, 12, 13], FinishReason.STOP)
        assert last.usage == tokenwire.Usage(prompt_tokens=1, completion_tokens=2)
        assert last.prompt_token_ids is None
        assert await anext(a, None) is None
        # Unread deltas have been merged.
        peer.finish(2)
        result = await b.result()
        assert (result.request_id, result.token_ids, result.prompt_token_ids) == ("b", [20, 21, 22], [1])
        assert await b.result() is result


async def test_deltas_are_merged_until_they_are_read(serve: Serve) -> None:
    """FIELD_LOG S6."""
    async with opened(serve) as (peer, mux, _):
        slow, quick = mux.submit([1]), mux.submit([1])
        for token_id in range(5):
            peer.step(handles=[1, 2], token_ids=[token_id, token_id])
        seen = 0
        while seen < 5:
            seen += len((await anext(quick)).token_ids)
        assert (await anext(slow)).token_ids == [0, 1, 2, 3, 4]


async def test_several_sequences(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream = mux.submit([1], SamplingParams(n=2))
        peer.step(handles=[1], token_ids=[5])
        delta = await anext(stream)
        assert [(output.index, output.token_ids) for output in delta.outputs] == [(0, [5])]
        peer.step(finished=[finish(1, last=False, usage=None)])
        delta = await anext(stream)
        assert [(output.index, output.finish_reason) for output in delta.outputs] == [(0, FinishReason.STOP)]
        assert delta.usage is None
        peer.step(handles=[1], indexes=[1], token_ids=[6], finished=[finish(1, index=1, stop_token_id=6)])
        delta = await anext(stream)
        assert [(output.index, output.token_ids, output.stop_token_id) for output in delta.outputs] == [(1, [6], 6)]
        assert await anext(stream, None) is None

        whole = mux.submit([1], SamplingParams(n=2))
        handle = whole.handle
        ends = [finish(handle, index=1, last=False), finish(handle)]
        peer.step(handles=[handle] * 3, indexes=[1, 0, 1], token_ids=[1, 2, 3], finished=ends)
        result = await whole.result()
        assert [(output.index, output.token_ids) for output in result.outputs] == [(0, [2]), (1, [1, 3])]


async def test_everything_that_a_finish_tells(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream = mux.submit([1])
        end = finish(
            1,
            timing=generation_pb2.Timing(total_time=Duration(seconds=2)),
            kv_transfer_params_json='{"a": 5600}',
            ec_transfer_params_json="{}",
            sampling_mask=generation_pb2.SamplingMask(counts=[1], token_ids=b"\7\0\0\0"),
            routed_experts=generation_pb2.RoutedExperts(data=b"\1", shape=[1, 1, 1], dtype="uint8"),
            weight_versions=[generation_pb2.WeightVersionSpan(version="v", start=0, end=1)],
            speculative_decoding=generation_pb2.SpeculativeDecoding(num_drafts=1),
        )
        peer.step(handles=[1], token_ids=[7], finished=[end])
        result = await stream.result()
        assert result.timing == tokenwire.Timing(total_time=2.0)
        assert (result.kv_transfer_params_json, result.ec_transfer_params_json) == ('{"a": 5600}', "{}")
        output = result.outputs[0]
        assert output.sampling_mask == tokenwire.SamplingMask([1], [7])
        assert output.routed_experts == tokenwire.RoutedExperts(b"\1", (1, 1, 1), "uint8")
        assert output.weight_versions == (tokenwire.WeightVersionSpan("v", 0, 1),)
        assert output.speculative_decoding == tokenwire.SpeculativeDecoding(1, 0, 0)


async def test_logprobs_of_some_entries(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        plain, with_logprobs = mux.submit([1]), mux.submit([1], SamplingParams(logprobs=2))
        columns = multiplex_pb2.MultiplexLogprobs(
            entries=[1, 2],
            top_ks=[2, 2],
            logprobs=[-1, -2, -3],
            ranks=[1, 2, 3],
            top_token_ids=[1, 2, 3, 4, 5, 6],
            top_logprobs=[-1, -2, -3, -4, -5, -6],
        )
        peer.step(
            handles=[1, 2, 2],
            token_counts=[1, 2, 1],
            token_ids=[9, 1, 4, 8],
            logprobs=columns,
            finished=[finish(1), finish(2, cumulative_logprob=-6.0)],
        )
        assert (await plain.result()).outputs[0].logprobs is None
        logprobs = (await with_logprobs.result()).outputs[0].logprobs
        assert logprobs == tokenwire.Logprobs(
            logprobs=[-1, -2, -3],
            ranks=[1, 2, 3],
            top_k=2,
            top_token_ids=[1, 2, 3, 4, 5, 6],
            top_logprobs=[-1, -2, -3, -4, -5, -6],
            cumulative_logprob=-6.0,
        )


async def test_logprobs_of_all_entries(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream = mux.submit([1], SamplingParams(logprobs=0))
        for token_id in (4, 5):
            columns = multiplex_pb2.MultiplexLogprobs(top_ks=[0], logprobs=[-token_id], ranks=[token_id])
            peer.step(handles=[1], token_ids=[token_id], logprobs=columns)
        seen: list[tuple[float, int]] = []
        while len(seen) < 2:
            logprobs = (await anext(stream)).outputs[0].logprobs
            assert logprobs is not None
            assert logprobs.cumulative_logprob is None
            seen += list(zip(logprobs.logprobs, logprobs.ranks, strict=True))
        assert seen == [(-4, 4), (-5, 5)]
        peer.step(finished=[finish(1, cumulative_logprob=-9.0)])
        logprobs = (await anext(stream)).outputs[0].logprobs
        assert logprobs is not None
        assert (logprobs.logprobs, logprobs.cumulative_logprob) == ([], -9.0)


async def test_prompt_logprobs_are_put_together(serve: Serve) -> None:
    def part(offset: int, values: list[float]) -> pb.MultiplexResponse:
        message = logprobs_pb2.PromptLogprobs(
            offset=offset, logprobs=values, ranks=[1] * len(values), top_k=1, top_token_ids=[7] * len(values)
        )
        message.top_logprobs.extend(values)
        return pb.MultiplexResponse(
            prompt_logprobs=multiplex_pb2.MultiplexPromptLogprobs(handle=1, prompt_logprobs=message)
        )

    async with opened(serve) as (peer, mux, _):
        stream, other = mux.submit([1, 2, 3, 4], SamplingParams(prompt_logprobs=1)), mux.submit([1])
        reading = asyncio.ensure_future(anext(stream))
        peer.answer(part(1, [-1, -2]))
        peer.step(handles=[1, 2], token_ids=[5, 6])
        # The others do not wait for them.
        assert (await anext(other)).token_ids == [6]
        assert not reading.done()
        peer.answer(part(3, [-3]))
        delta = await reading
        assert delta.token_ids == [5]
        assert delta.prompt_logprobs == tokenwire.PromptLogprobs(
            offset=1,
            logprobs=[-1, -2, -3],
            ranks=[1, 1, 1],
            top_k=1,
            top_token_ids=[7, 7, 7],
            top_logprobs=[-1, -2, -3],
            token_id_logprobs=[],
        )
        assert delta.prompt_logprobs.top(2) == [(7, -2.0)]
        peer.tokens(1, 8)
        assert (await anext(stream)).prompt_logprobs is None


REFUSALS = [
    ("rejected", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", tokenwire.InvalidArgumentError),
    ("rejected", grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL", tokenwire.OverloadedError),
    ("rejected", grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", tokenwire.AlreadyExistsError),
    ("failed", grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", tokenwire.EngineDeadError),
    ("failed", grpc.StatusCode.INTERNAL, "REQUEST_FAILED", tokenwire.RequestFailedError),
    ("failed", grpc.StatusCode.UNAVAILABLE, "", tokenwire.UnavailableError),
]


@pytest.mark.parametrize(("kind", "code", "reason", "expected"), REFUSALS, ids=str)
async def test_refusal_of_one_request(
    serve: Serve, kind: str, code: grpc.StatusCode, reason: str, expected: type[tokenwire.StatusError]
) -> None:
    async with opened(serve) as (peer, mux, _):
        refused, awaited, other = mux.submit([1]), mux.submit([1]), mux.submit([1])
        status = error_status(
            code,
            reason,
            field_violations=[error_pb2.FieldViolation(field="submit.input.sampling_params.n", description="bad")],
            retry_delay=Duration(seconds=1, nanos=500_000_000),
        )
        if kind == "rejected":
            refusals = [multiplex_pb2.MultiplexRejection(handle=handle, status=status) for handle in (1, 2)]
            peer.step(rejected=refusals)
        else:
            failures = [multiplex_pb2.MultiplexFailure(handle=handle, status=status) for handle in (1, 2)]
            peer.step(handles=[1], token_ids=[4], failed=failures)
        if kind == "failed":
            assert (await anext(refused)).token_ids == [4]
        with pytest.raises(expected) as caught:
            await anext(refused)
        assert type(caught.value) is expected
        assert (caught.value.reason, caught.value.retry_delay) == (reason, 1.5)
        assert caught.value.field_violations == (tokenwire.FieldViolation("input.sampling_params.n", "bad"),)
        assert await anext(refused, None) is None
        for _ in range(2):
            with pytest.raises(expected):
                await awaited.result()
        peer.step(handles=[3], token_ids=[5], finished=[finish(3)])
        assert (await other.result()).token_ids == [5]


async def test_a_code_of_a_later_grpc_is_a_status_error(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream = mux.submit([1])
        status = error_pb2.ErrorStatus(code=99, reason="NEW")
        peer.step(rejected=[multiplex_pb2.MultiplexRejection(handle=1, status=status)])
        with pytest.raises(tokenwire.StatusError) as caught:
            await stream.result()
        assert (caught.value.code, caught.value.reason) == (tokenwire.StatusCode.UNKNOWN, "NEW")


async def test_a_refused_abort_does_not_hit_the_handles_next_request(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        mux.submit([1]).abort()
        peer.finish(1)
        await until(lambda: is_free(mux, 1))
        again = mux.submit([2])
        assert again.handle == 1
        status = error_status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_HANDLE")
        peer.step(rejected=[multiplex_pb2.MultiplexRejection(handle=1, status=status)])
        peer.step(handles=[1], token_ids=[5], finished=[finish(1)])
        assert (await again.result()).token_ids == [5]


async def test_handles_are_used_again_only_after_the_last_finish(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        streams = [mux.submit([1]) for _ in range(3)]
        assert [stream.handle for stream in streams] == [1, 2, 3]
        peer.step(finished=[finish(1, last=False), finish(2)])
        await streams[1].result()
        await until(lambda: is_free(mux, 2))
        assert mux.submit([1]).handle == 2
        assert mux.submit([1]).handle == 4
        # A request that was left keeps its handle until the server reports its end.
        await streams[2].aclose()
        assert mux.submit([1]).handle == 5
        peer.step(handles=[3], token_ids=[1], finished=[finish(3, ABORT)])
        await until(lambda: is_free(mux, 3))
        assert mux.submit([1]).handle == 3


def test_handles_stay_small() -> None:
    handles = Handles()
    for _ in range(100_000):
        assert {handles.take() for _ in range(3)} == {1, 2, 3}
        for handle in (1, 2, 3):
            handles.end(handle)
            handles.end(handle)
        assert handles.abort([1]) == []
        handles.recycle()
    assert len(handles) == 0


async def test_abort_follows_the_submit_and_ends_with_the_tokens_so_far(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream, other = mux.submit([1]), mux.submit([1])
        stream.abort()
        await peer.submit()
        await peer.submit()
        assert await peer.abort() == [1]
        peer.step(handles=[1, 2], token_ids=[5, 6], finished=[finish(1, ABORT)])
        result = await stream.result()
        assert (result.token_ids, result.finish_reason) == ([5], FinishReason.ABORT)
        stream.abort()  # has no effect
        other.abort()
        assert await peer.abort() == [2]


async def leave_by_aclose(stream: MultiplexedStream) -> None:
    await stream.aclose()
    await stream.aclose()
    assert await anext(stream, None) is None


async def leave_with_block(stream: MultiplexedStream) -> None:
    async with stream:
        pass


async def leave_by_break(stream: MultiplexedStream) -> None:
    async for _ in stream:
        break


async def leave_unread(_stream: MultiplexedStream) -> None:
    pass


async def cancel_while_waiting(waiting: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.create_task(waiting)
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancelling_the_iteration(stream: MultiplexedStream) -> None:
    await cancel_while_waiting(collect(stream))


async def leave_by_cancelling_result(stream: MultiplexedStream) -> None:
    await cancel_while_waiting(stream.result())


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_aclose,
        leave_with_block,
        leave_by_break,
        leave_unread,
        leave_by_cancelling_the_iteration,
        leave_by_cancelling_result,
    ],
    ids=lambda leave: leave.__name__,
)
async def test_leaving_a_stream_aborts_that_request_alone(
    serve: Serve, leave: Callable[[MultiplexedStream], Awaitable[None]]
) -> None:
    async with opened(serve) as (peer, mux, _):
        other = mux.submit([1])
        peer.step(handles=[1, 2], token_ids=[4, 5])
        await leave(mux.submit([2]))
        for _ in range(2):
            await peer.submit()
        assert await peer.abort() == [2]
        peer.step(handles=[2, 1], token_ids=[6, 7], finished=[finish(2, ABORT), finish(1)])
        assert (await other.result()).token_ids == [4, 7]
        assert mux._backpressure.unread_tokens == 0
        peer.end()
        await mux.drain()


async def test_closing_in_one_task_ends_the_read_in_another(serve: Serve) -> None:
    async with opened(serve) as (_, mux, _client):
        stream = mux.submit([1])
        task = asyncio.create_task(collect(stream))
        await turns()
        await stream.aclose()
        assert await task == []


async def test_closing_in_one_task_is_an_error_for_who_awaits_the_result(serve: Serve) -> None:
    async with opened(serve) as (_, mux, _client):
        stream = mux.submit([1])
        task = asyncio.create_task(stream.result())
        await turns()
        await stream.aclose()
        with pytest.raises(tokenwire.ClientClosedError):
            await task


async def test_one_reader_at_a_time(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream = mux.submit([1])
        task = asyncio.create_task(collect(stream))
        await turns()
        for second in (anext(stream), stream.result()):
            with pytest.raises(RuntimeError, match="another task"):
                await second
        peer.step(handles=[1], token_ids=[3], finished=[finish(1)])
        assert await task == [3]
        with pytest.raises(RuntimeError, match="result is incomplete"):
            await stream.result()


async def break_by_status(peer: MultiplexPeer, _opened: Opened) -> None:
    peer.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "slow")


async def break_by_early_end(peer: MultiplexPeer, _opened: Opened) -> None:
    peer.end()


async def break_by_broken_columns(peer: MultiplexPeer, _opened: Opened) -> None:
    peer.step(handles=[1, 2], token_ids=[1])


async def break_by_closing_the_client(_peer: MultiplexPeer, opened: Opened) -> None:
    await opened.client.close()


async def break_by_leaving_the_block(_peer: MultiplexPeer, opened: Opened) -> None:
    await opened.mux.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (break_by_status, tokenwire.ResourceExhaustedError),
        (break_by_early_end, tokenwire.InternalError),
        (break_by_broken_columns, tokenwire.InternalError),
        (break_by_closing_the_client, tokenwire.ClientClosedError),
        (break_by_leaving_the_block, tokenwire.ClientClosedError),
    ],
    ids=lambda value: value.__name__,
)
async def test_the_end_of_the_call_is_one_error_for_each_open_stream(
    serve: Serve, how: Callable[[MultiplexPeer, Opened], Awaitable[None]], expected: type[Exception]
) -> None:
    """FIELD_LOG 11."""
    async with opened(serve) as all_:
        peer, mux, _ = all_
        done, unread, reading, awaited = (mux.submit([1]) for _ in range(4))
        readers = [asyncio.create_task(collect(reading)), asyncio.create_task(awaited.result())]
        peer.step(handles=[1, 2], token_ids=[7, 8], finished=[finish(1)])
        assert (await anext(unread)).token_ids == [8]
        await how(peer, all_)
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [expected, expected]
        assert outcomes[0] is not outcomes[1]
        with pytest.raises(expected):
            await anext(unread)
        assert await anext(unread, None) is None
        # The result of the request that had ended is complete. No more can be submitted.
        assert (await done.result()).token_ids == [7]
        with pytest.raises(expected):
            mux.submit([1])
        unread.abort()
        await peer.ended.wait()


async def test_lost_server_ends_every_stream() -> None:
    peer = MultiplexPeer()
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(
        peer.multiplex, pb.MultiplexRequest.FromString, pb.MultiplexResponse.SerializeToString
    )
    service = pb.DESCRIPTOR.services_by_name["EngineService"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Multiplex": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(LIMIT), AsyncClient(f"127.0.0.1:{port}") as client, client.multiplex() as mux:
        tasks = [asyncio.create_task(mux.submit([1]).result()) for _ in range(100)]
        await peer.submit()
        await server.stop(None)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, tokenwire.UnreachableError | tokenwire.CallCancelledError)


async def test_nobody_there() -> None:
    async with asyncio.timeout(LIMIT), AsyncClient("127.0.0.1:1") as client, client.multiplex() as mux:
        streams = [mux.submit([1]) for _ in range(10)]
        for stream in streams:
            with pytest.raises(tokenwire.UnreachableError):
                await stream.result()
        with pytest.raises(tokenwire.UnreachableError):
            mux.submit([1])


async def test_deadline_of_the_call(serve: Serve) -> None:
    async with opened(serve, timeout=0.2) as (_, mux, _client):
        with pytest.raises(tokenwire.DeadlineExceededError):
            await mux.submit([1]).result()


@pytest.mark.parametrize("round_", range(10))
async def test_a_status_is_not_lost_among_writes(serve: Serve, round_: int) -> None:
    async with opened(serve) as (peer, mux, _):
        streams = [mux.submit([1] * 1000) for _ in range(300)]
        for _ in range(1 + round_ * 10):
            await peer.submit()
        peer.fail(grpc.StatusCode.PERMISSION_DENIED, "go away")
        for stream in streams:
            with pytest.raises(tokenwire.PermissionDeniedError, match="go away"):
                await stream.result()


async def test_thousands_at_once(serve: Serve) -> None:
    count = 3_000
    asyncio.get_running_loop().set_debug(False)  # it looks at the stack for each task
    async with opened(serve) as (peer, mux, _):
        streams = [mux.submit([i], request_id=str(i)) for i in range(count)]
        tasks = [asyncio.create_task(stream.result()) for stream in streams]
        handles = [(await peer.submit()).handle for _ in range(count)]
        assert handles == [stream.handle for stream in streams]
        peer.step(handles=handles, token_ids=range(count), finished=[finish(handle) for handle in handles])
        results = await asyncio.gather(*tasks)
        assert [result.token_ids for result in results] == [[i] for i in range(count)]


async def test_slow_readers_hold_back_the_server_and_never_block(serve: Serve) -> None:
    messages, tokens = 400, 1_000
    async with opened(serve, max_buffered_tokens=2_000) as (peer, mux, _):
        unread, awaited = mux.submit([1]), mux.submit([1])
        for i in range(messages):
            peer.tokens(1, *([100_000 + i] * tokens))
        peer.finish(1)
        peer.step(handles=[2], token_ids=[5], finished=[finish(2)])
        await until(lambda: mux._backpressure.is_paused)
        await asyncio.sleep(0.05)  # too short a time would not fail the test
        # No reader waits: at most one message above the limit is buffered, and the server holds back the rest.
        assert mux._backpressure.unread_tokens <= 2_000 + tokens
        assert peer.sent < messages
        # Reading what has arrived makes room for as much.
        first = await anext(unread)
        assert 2_000 < len(first.token_ids) <= 2_000 + tokens
        await until(lambda: mux._backpressure.is_paused)
        assert mux._backpressure.unread_tokens <= 2_000 + tokens
        # The awaited request is behind the unread one, and still finishes.
        assert (await awaited.result()).token_ids == [5]
        rest = await collect(unread)
        assert len(first.token_ids) + len(rest) == messages * tokens
        assert mux._backpressure.unread_tokens == 0


async def test_drain_takes_everything_in_spite_of_the_limit(serve: Serve) -> None:
    async with opened(serve, max_buffered_tokens=10) as (peer, mux, _):
        stream = mux.submit([1])
        for _ in range(10):
            peer.tokens(1, *range(100))
        peer.finish(1)
        peer.end()
        await mux.drain()
        await mux.drain()
        assert len((await stream.result()).token_ids) == 1_000


async def test_leaving_while_readers_are_slow(serve: Serve) -> None:
    async with opened(serve, max_buffered_tokens=10) as (peer, mux, _):
        stream = mux.submit([1])
        peer.tokens(1, *range(100))
        await until(lambda: mux._backpressure.is_paused)
    assert (await anext(stream)).token_ids == list(range(100))
    with pytest.raises(tokenwire.ClientClosedError):
        await anext(stream)


async def test_half_close_after_the_last_request(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        streams = [mux.submit([1]) for _ in range(2)]
        mux.done_submitting()
        with pytest.raises(tokenwire.ClientClosedError, match="done_submitting"):
            mux.submit([1])
        # Aborts are still sent.
        streams[1].abort()
        for _ in range(2):
            await peer.submit()
        assert await peer.abort() == [2]
        draining = asyncio.create_task(mux.drain())
        peer.step(handles=[1], token_ids=[1], finished=[finish(1), finish(2, ABORT)])
        await peer.half_close()
        assert not draining.done()
        peer.end()
        await draining
        assert [(await stream.result()).finish_reason for stream in streams] == [FinishReason.STOP, FinishReason.ABORT]


async def test_half_close_without_a_request(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        draining = asyncio.create_task(mux.drain())
        await peer.half_close()
        peer.end()
        await draining
        with pytest.raises(tokenwire.ClientClosedError):
            mux.submit([1])


async def test_drain_raises_what_ended_the_call(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream = mux.submit([1])
        draining = asyncio.create_task(mux.drain())
        await peer.submit()
        peer.fail(grpc.StatusCode.INTERNAL, "bug")
        with pytest.raises(tokenwire.InternalError):
            await draining
        with pytest.raises(tokenwire.InternalError):
            await stream.result()


async def test_leaving_the_block_ends_the_call(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        for _ in range(100):
            mux.submit([1]).abort()
        await peer.started.wait()
    await asyncio.wait_for(peer.ended.wait(), LIMIT)
    with pytest.raises(tokenwire.ClientClosedError):
        mux.submit([1])
    with pytest.raises(RuntimeError):
        await mux.__aenter__()


async def test_what_later_servers_send_is_skipped(serve: Serve) -> None:
    async with opened(serve) as (peer, mux, _):
        stream = mux.submit([1])
        later_event = b"\xfa\x06\x02\x08\x01"  # field 111, a message
        peer.answer(pb.MultiplexResponse.FromString(later_event))
        step = multiplex_pb2.MultiplexStep(handles=[1], token_ids=[4]).SerializeToString() + later_event
        peer.answer(pb.MultiplexResponse(step=multiplex_pb2.MultiplexStep.FromString(step)))
        peer.step(handles=[77, 1], token_ids=[1, 5], finished=[finish(77), finish(1, 250)])
        result = await stream.result()
        assert (result.token_ids, result.finish_reason) == ([4, 5], FinishReason.UNKNOWN)


async def test_what_cannot_be_sent_is_refused_at_once(serve: Serve) -> None:
    async with opened(serve) as (_, mux, client):
        with pytest.raises(tokenwire.InvalidArgumentError):
            mux.submit([-1])
        with pytest.raises(tokenwire.InvalidArgumentError):
            client.multiplex(max_buffered_tokens=0)
        assert mux.submit([1]).handle == 1
        with pytest.raises(tokenwire.ClientClosedError):
            client.multiplex().submit([1])
        with pytest.raises(tokenwire.ClientClosedError):
            await client.multiplex().drain()


async def test_a_message_over_the_limit_does_not_end_the_others(serve: Serve) -> None:
    peer = MultiplexPeer()
    address = await serve(Multiplex=peer.multiplex)
    async with (
        asyncio.timeout(LIMIT),
        AsyncClient(address, max_send_message_bytes=1_000) as client,
        client.multiplex() as mux,
    ):
        stream = mux.submit([1])
        with pytest.raises(tokenwire.MessageTooLargeError, match="1000"):
            mux.submit([1] * 2_000)
        peer.step(handles=[1], token_ids=[5], finished=[finish(1)])
        assert (await stream.result()).token_ids == [5]


async def test_more_than_a_message_holds_left_in_one_turn_are_all_aborted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS D1."""
    monkeypatch.setattr(call, "_MAX_ABORT_HANDLES", 100)
    async with opened(serve) as (peer, mux, _):
        streams = [mux.submit([1]) for _ in range(164)]
        for stream in streams:
            stream.abort()
            await stream.aclose()
        for _ in streams:
            await peer.submit()
        messages = [await peer.abort() for _ in range(2)]
        assert [len(message) for message in messages] == [100, 64]
        assert {handle for message in messages for handle in message} == {stream.handle for stream in streams}


async def test_an_idle_multiplex_tells_that_it_has_ended(serve: Serve) -> None:
    """FAULTS F8."""
    async with opened(serve) as (peer, mux, _):
        await peer.started.wait()
        waiting = asyncio.create_task(mux.wait_closed())
        await turns()
        assert not waiting.done()
        peer.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")
        with pytest.raises(tokenwire.ResourceExhaustedError):
            await waiting
    async with opened(serve) as (peer, mux, _):
        waiting = asyncio.create_task(mux.wait_closed())
        mux.done_submitting()
        await peer.half_close()
        peer.end()
        await waiting
