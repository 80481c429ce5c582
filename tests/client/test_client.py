import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import tokenwire
from tokenwire import AbortOutcome, AbortResult, AsyncClient, SamplingParams
from tokenwire.v1 import engine_info_pb2, generation_pb2
from tokenwire.v1 import engine_service_pb2 as pb

Serve = Callable[..., Awaitable[str]]
Context = grpc.aio.ServicerContext[Any, Any]
LIMIT = 20.0


async def echo(request: pb.GenerateRequest, _context: Context) -> pb.GenerateResponse:
    output = generation_pb2.SequenceOutput(
        token_ids=request.input.prompt_token_ids, finish_reason=generation_pb2.FINISH_REASON_LENGTH
    )
    return pb.GenerateResponse(
        request_id=request.input.request_id, outputs=[output], usage=generation_pb2.Usage(prompt_tokens=2)
    )


async def test_generate(serve: Serve) -> None:
    seen: list[pb.GenerateRequest] = []

    async def handler(request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        seen.append(request)
        return await echo(request, context)

    async with AsyncClient(await serve(Generate=handler)) as client:
        result = await client.generate([4, 5], SamplingParams(max_tokens=3), model="m", timeout=LIMIT)
    assert result.token_ids == [4, 5]
    assert result.finish_reason is tokenwire.FinishReason.LENGTH
    assert result.usage.prompt_tokens == 2
    assert seen[0].input.sampling_params.max_tokens == 3
    assert seen[0].input.model == "m"
    assert result.request_id == seen[0].input.request_id != ""


async def test_deadline_and_metadata_arrive(serve: Serve) -> None:
    async def handler(request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        remaining = context.time_remaining()
        assert remaining is not None
        assert 0 < remaining < 2 * LIMIT  # gRPC rounds it up on the wire
        metadata = list(context.invocation_metadata() or ())
        expected = [("x-of-client", "1"), ("authorization", "Bearer secret"), ("x-of-call", "2"), ("x-bin", b"\xff")]
        assert [pair for pair in metadata if pair in expected] == expected
        return await echo(request, context)

    target, token = await serve(Generate=handler), "secret"
    async with AsyncClient(target, token=token, metadata={"X-Of-Client": "1"}) as client:
        await client.generate([1], timeout=LIMIT, metadata=[("x-of-call", "2"), ("x-bin", b"\xff")])


async def test_a_token_that_cannot_be_sent_is_not_shown() -> None:
    # A token as read from a file.
    with pytest.raises(tokenwire.InvalidArgumentError) as caught:
        AsyncClient(token="secret\n")  # noqa: S106
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("metadata", [{"bad name": "x"}, {"": "x"}, {"k": "é"}, {"k": "a\nb"}, {"k": b"x"}], ids=str)
async def test_metadata_that_cannot_be_sent(metadata: Any) -> None:
    with pytest.raises(tokenwire.InvalidArgumentError) as caught:
        AsyncClient(metadata=metadata)
    assert [violation.field for violation in caught.value.field_violations] == ["metadata"]
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(tokenwire.InvalidArgumentError):
            await client.generate([1], metadata=metadata)
        with pytest.raises(tokenwire.InvalidArgumentError):
            client.stream([1], metadata=metadata)


@pytest.mark.parametrize("seconds", [None, float("inf"), 1e12])
async def test_no_deadline(serve: Serve, seconds: float | None) -> None:
    async def handler(request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        assert context.time_remaining() is None
        return await echo(request, context)

    async with AsyncClient(await serve(Generate=handler)) as client:
        await client.generate([1], timeout=seconds)


async def test_timeout_is_a_deadline(serve: Serve) -> None:
    ended = asyncio.Event()

    async def handler(_request: pb.GenerateRequest, _context: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncClient(await serve(Generate=handler)) as client:
        with pytest.raises(tokenwire.DeadlineExceededError) as caught:
            await client.generate([1], timeout=0.1)
        assert caught.value.code is tokenwire.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(ended.wait(), LIMIT)


async def test_cancelled_task_cancels_the_call(serve: Serve) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def handler(_request: pb.GenerateRequest, _context: Context) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncClient(await serve(Generate=handler)) as client:
        task = asyncio.create_task(client.generate([1]))
        await asyncio.wait_for(started.wait(), LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), LIMIT)


async def test_closing_the_client_ends_its_calls(serve: Serve) -> None:
    started = asyncio.Event()

    async def handler(_request: pb.GenerateRequest, _context: Context) -> None:
        started.set()
        await asyncio.Event().wait()

    client = AsyncClient(await serve(Generate=handler))
    task = asyncio.create_task(client.generate([1]))
    await asyncio.wait_for(started.wait(), LIMIT)
    await client.close()
    with pytest.raises(tokenwire.ClientClosedError):
        await asyncio.wait_for(task, LIMIT)
    with pytest.raises(tokenwire.ClientClosedError):
        await client.generate([1])
    with pytest.raises(tokenwire.ClientClosedError):
        client.stream([1])
    await client.close()


async def test_abort(serve: Serve) -> None:
    async def handler(request: pb.AbortRequest, _context: Context) -> pb.AbortResponse:
        assert request.remember_unknown_for.seconds == 30
        outcomes = [pb.ABORT_OUTCOME_ABORTED, pb.ABORT_OUTCOME_REMEMBERED]
        results = [
            pb.AbortResult(request_id=request_id, outcome=outcome)
            for request_id, outcome in zip(request.request_ids, outcomes, strict=True)
        ]
        return pb.AbortResponse(results=results)

    async with AsyncClient(await serve(Abort=handler)) as client:
        results = await client.abort(["a", "b"], remember_unknown_for=30, timeout=LIMIT)
        assert results == [AbortResult("a", AbortOutcome.ABORTED), AbortResult("b", AbortOutcome.REMEMBERED)]
        for ids, field in (("abc", "request_ids"), (["a", 1], "request_ids[1]")):
            with pytest.raises(tokenwire.InvalidArgumentError) as caught:
                await client.abort(ids)  # type: ignore[arg-type]
            assert caught.value.field_violations[0].field == field
        with pytest.raises(tokenwire.InvalidArgumentError) as caught:
            await client.abort(["a"], remember_unknown_for=float("nan"))
        assert caught.value.field_violations[0].field == "remember_unknown_for"


async def test_engine_info(serve: Serve) -> None:
    async def handler(_request: pb.GetEngineInfoRequest, _context: Context) -> pb.GetEngineInfoResponse:
        return pb.GetEngineInfoResponse(info=engine_info_pb2.EngineInfo(model="m", vocab_size=9, features=["f"]))

    async with AsyncClient(await serve(GetEngineInfo=handler)) as client:
        info = await client.engine_info(timeout=LIMIT)
    assert (info.model, info.vocab_size, info.dtype, info.features) == ("m", 9, None, frozenset({"f"}))


async def test_bad_value_is_refused_before_the_call() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(tokenwire.InvalidArgumentError):
            await client.generate([1], SamplingParams(n=-1))
        with pytest.raises(tokenwire.InvalidArgumentError):
            client.stream([-1])


async def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{bound.getsockname()[1]}"
        async with AsyncClient(target) as client:
            for call in (client.generate([1]), client.engine_info(), anext(client.stream([1]))):
                with pytest.raises(tokenwire.UnreachableError, match=f"cannot reach {target}: .*refused") as caught:
                    await asyncio.wait_for(call, LIMIT)
                assert caught.value.target == target
                assert caught.value.is_retry_safe


async def test_listener_that_never_answers_is_given_up() -> None:
    """FIELD_LOG 3."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(target, connect_timeout=0.2) as client:
            with pytest.raises(tokenwire.UnreachableError, match=target):
                await asyncio.wait_for(client.generate([1]), LIMIT)


async def test_client_reconnects(serve: Serve, tmp_path: Path) -> None:
    target = f"unix:{tmp_path / 'socket'}"
    async with AsyncClient(target) as client:
        with pytest.raises(tokenwire.UnreachableError):
            await client.generate([1], timeout=LIMIT)
        await serve(target, Generate=echo)
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    assert (await client.generate([1, 2])).token_ids == [1, 2]
                    break
                except tokenwire.UnreachableError:
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("seconds", [0, -1])
async def test_timeout_that_is_over(serve: Serve, seconds: float) -> None:
    async def handler(_request: pb.GenerateRequest, _context: Context) -> None:
        await asyncio.Event().wait()

    async with AsyncClient(await serve(Generate=handler)) as client, asyncio.timeout(LIMIT):
        with pytest.raises(tokenwire.DeadlineExceededError):
            await client.generate([1], timeout=seconds)


@pytest.mark.parametrize("option", ["max_receive_message_bytes", "max_send_message_bytes"])
async def test_message_over_the_limit(serve: Serve, option: str) -> None:
    """FAULTS D12."""
    async with AsyncClient(await serve(Generate=echo), **{option: 1000}) as client:  # type: ignore[arg-type]
        with pytest.raises(tokenwire.MessageTooLargeError, match="larger than max"):
            await client.generate(range(2000), timeout=LIMIT)
        # The connection stays open.
        assert (await client.generate([3], timeout=LIMIT)).token_ids == [3]


async def test_answers_beyond_grpcs_own_default_of_4_mib_fit(serve: Serve) -> None:
    """FIELD_LOG 5."""
    async with AsyncClient(await serve(Generate=echo)) as client:
        result = await client.generate([2**32 - 1] * 1_000_000, timeout=LIMIT)
    assert len(result.token_ids) == 1_000_000


async def test_channel_options_override_the_client_s_own(serve: Serve) -> None:
    options = [("grpc.max_receive_message_length", 1000)]
    async with AsyncClient(await serve(Generate=echo), channel_options=options) as client:
        with pytest.raises(tokenwire.MessageTooLargeError, match="larger than max"):
            await client.generate(range(2000), timeout=LIMIT)


async def test_message_over_the_limit_of_the_server(serve: Serve) -> None:
    """FAULTS D12."""
    async with AsyncClient(await serve(Generate=echo), max_send_message_bytes=-1) as client:
        with pytest.raises(tokenwire.MessageTooLargeError, match="larger than max"):
            await client.generate([2**32 - 1] * 14_000_000, timeout=LIMIT)


async def read(client: AsyncClient, params: Any) -> None:
    await anext(client.stream([1], params))


@pytest.mark.parametrize("params", [{"max_tokens": 5}, "greedy", 5])
async def test_sampling_params_of_another_type(params: Any) -> None:
    """FAULTS D5."""
    async with AsyncClient("127.0.0.1:1") as client:
        for call in (client.generate([1], params), read(client, params)):
            with pytest.raises(tokenwire.InvalidArgumentError, match="must be SamplingParams") as caught:
                await call
            assert [violation.field for violation in caught.value.field_violations] == ["input.sampling_params"]


async def test_an_iterator_is_a_sequence_of_ids(serve: Serve) -> None:
    """FAULTS D5."""
    async with AsyncClient(await serve(Generate=echo)) as client:
        ids: Any = iter([3, 4])
        assert (await client.generate(ids, timeout=LIMIT)).token_ids == [3, 4]
        ids = iter([3, -4])
        with pytest.raises(tokenwire.InvalidArgumentError) as caught:
            await client.generate(ids, timeout=LIMIT)
        assert [violation.field for violation in caught.value.field_violations] == ["input.prompt_token_ids[1]"]
        ids = iter(["a", 5])
        with pytest.raises(tokenwire.InvalidArgumentError) as caught:
            await client.abort(ids, timeout=LIMIT)
        assert [violation.field for violation in caught.value.field_violations] == ["request_ids[1]"]


async def test_server_without_the_method(serve: Serve) -> None:
    async with AsyncClient(await serve()) as client:
        with pytest.raises(tokenwire.UnimplementedError):
            await client.generate([1], timeout=LIMIT)
