"""Abort says what became of each id, and the aborted call says the same."""

import asyncio
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, collect, read, within
from tokenwire.v1 import generation_pb2
from tokenwire.v1.engine_service_pb2 import (
    ABORT_OUTCOME_ABORTED,
    ABORT_OUTCOME_ALREADY_FINISHED,
    ABORT_OUTCOME_NOT_FOUND,
    ABORT_OUTCOME_REMEMBERED,
    AbortRequest,
)
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

ABORT = generation_pb2.FINISH_REASON_ABORT
STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH


@pytest.fixture(params=[True, False], ids=["direct", "ordinary"])
async def server(request: pytest.FixtureRequest, vllm_config: VllmConfig) -> Any:
    async with FakeEngineServer.run(vllm_config, direct_path=request.param) as running:
        yield running


async def test_a_waiting_unary_call_ends_ok_with_the_tokens_so_far(server: FakeEngineServer) -> None:
    """FIELD_LOG 35."""
    call = server.generate(request_id="a")
    request = await server.core.next_request()
    request.step(5, 6)
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]
    response = await within(call)
    assert response.outputs == [generation_pb2.SequenceOutput(token_ids=[5, 6], finish_reason=ABORT)]
    assert response.usage.completion_tokens == 2
    assert await server.core.next_abort() == [request.internal_id]
    assert server.core.idle


async def test_a_stream_ends_ok_with_abort_and_usage(server: FakeEngineServer) -> None:
    call = server.stream(request_id="a")
    request = await server.core.next_request()
    request.step(5)
    await read(call)
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]
    [last] = await collect(call)
    assert last.outputs == [generation_pb2.SequenceOutput(finish_reason=ABORT)]
    assert last.usage.completion_tokens == 1
    assert await server.core.next_abort() == [request.internal_id]
    assert server.core.idle


async def test_a_request_without_a_token(server: FakeEngineServer) -> None:
    call = server.generate(request_id="a")
    await server.core.next_request()
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]
    response = await within(call)
    assert response.outputs == [generation_pb2.SequenceOutput(finish_reason=ABORT)]
    assert response.usage == generation_pb2.Usage(prompt_tokens=3)


async def test_all_sequences_of_a_request(server: FakeEngineServer) -> None:
    call = server.generate(request_id="a", sampling={"n": 3})
    sequences = await server.core.next_requests(3)
    sequences[0].step(5, finish="stop")
    sequences[1].step(6)
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]
    outputs = (await within(call)).outputs
    assert [(list(output.token_ids), output.finish_reason) for output in outputs] == [
        ([5], STOP),
        ([6], ABORT),
        ([], ABORT),
    ]
    assert server.engine.unfinished == 0
    assert not server.core.live


async def test_outcomes_come_in_the_order_asked_and_alike_for_a_repeated_id(server: FakeEngineServer) -> None:
    """FIELD_LOG 33."""
    live = server.generate(request_id="live")
    await server.core.next_request()
    server.core.answer = [5]
    await within(server.generate(request_id="finished"))
    outcomes = await server.abort("unknown", "live", "finished", "live", "unknown")
    assert outcomes == [
        ABORT_OUTCOME_NOT_FOUND,
        ABORT_OUTCOME_ABORTED,
        ABORT_OUTCOME_ALREADY_FINISHED,
        ABORT_OUTCOME_ABORTED,
        ABORT_OUTCOME_NOT_FOUND,
    ]
    await within(live)


async def test_an_abort_may_be_repeated(server: FakeEngineServer) -> None:
    call = server.generate(request_id="a")
    await server.core.next_request()
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]
    await within(call)
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]


async def test_aborts_at_the_same_time_agree(server: FakeEngineServer) -> None:
    call = server.generate(request_id="a")
    await server.core.next_request()
    outcomes = await asyncio.gather(*[server.abort("a") for _ in range(5)])
    assert outcomes == [[ABORT_OUTCOME_ABORTED]] * 5
    assert (await within(call)).outputs[0].finish_reason == ABORT


async def test_many_requests_are_one_message_to_the_engine(server: FakeEngineServer) -> None:
    calls = [server.generate(request_id=f"r{i}") for i in range(5)]
    requests = await server.core.next_requests(5)
    assert await server.abort(*[f"r{i}" for i in range(5)]) == [ABORT_OUTCOME_ABORTED] * 5
    assert sorted(await server.core.next_abort()) == sorted(request.internal_id for request in requests)
    await within(asyncio.gather(*calls))
    assert server.core.idle


@pytest.mark.parametrize("other", ["a", "abc", "AB", "ab-", "0_ab", "b"])
async def test_only_the_exact_id_counts(server: FakeEngineServer, other: str) -> None:
    """FIELD_LOG S4."""
    call = server.generate(request_id="ab")
    request = await server.core.next_request()
    assert await server.abort(other, request.internal_id) == [ABORT_OUTCOME_NOT_FOUND] * 2
    request.step(5, finish="length")
    assert (await within(call)).outputs[0].finish_reason == LENGTH
    assert server.core.idle


async def test_from_another_connection(server: FakeEngineServer) -> None:
    """FIELD_LOG 29."""
    call = server.generate(request_id="a")
    await server.core.next_request()
    async with server.connect() as channel:
        response = await within(EngineServiceStub(channel).Abort(AbortRequest(request_ids=["a"])))
    assert response.results[0].outcome == ABORT_OUTCOME_ABORTED
    assert (await within(call)).outputs[0].finish_reason == ABORT


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_an_abort_that_races_with_the_end_tells_what_the_call_tells(
    server: FakeEngineServer, stream: bool
) -> None:
    seen = set()
    for turns in range(24):
        request_id = f"r{turns}"
        call: Any = server.stream(request_id=request_id) if stream else server.generate(request_id=request_id)
        request = await server.core.next_request()
        abort = asyncio.create_task(server.abort(request_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        request.step(5, finish="stop")
        [outcome] = await within(abort)
        last = (await collect(call))[-1] if stream else await within(call)
        reason = last.outputs[-1].finish_reason
        assert (outcome, reason) in {(ABORT_OUTCOME_ABORTED, ABORT), (ABORT_OUTCOME_ALREADY_FINISHED, STOP)}
        seen.add(reason)
    assert STOP in seen


async def test_an_end_that_the_caller_has_not_read_yet_is_not_an_abort(server: FakeEngineServer) -> None:
    call = server.stream(request_id="a")
    request = await server.core.next_request()
    request.step(5, finish="stop")
    await read(call)
    assert await server.abort("a") == [ABORT_OUTCOME_ALREADY_FINISHED]


async def test_the_answer_waits_until_the_engine_has_acted(server: FakeEngineServer) -> None:
    """FIELD_LOG S5."""
    server.core.confirmation.clear()
    call = server.generate(request_id="a")
    await server.core.next_request()
    abort = asyncio.create_task(server.abort("a"))
    # The call itself need not wait: its outcome is certain.
    assert (await within(call)).outputs[0].finish_reason == ABORT
    assert not abort.done()
    server.core.confirmation.set()
    assert await within(abort) == [ABORT_OUTCOME_ABORTED]


async def test_a_request_that_is_just_on_its_way_into_the_engine(server: FakeEngineServer) -> None:
    server.core.admission.clear()
    call = server.generate(request_id="a")
    request = await server.core.next_request()
    abort = asyncio.create_task(server.abort("a"))
    # The abort waits; another one of an unknown id shows that it has arrived.
    assert await server.abort("b") == [ABORT_OUTCOME_NOT_FOUND]
    assert not abort.done()
    server.core.admission.set()
    assert await within(abort) == [ABORT_OUTCOME_ABORTED]
    assert (await within(call)).outputs[0].finish_reason == ABORT
    assert not request.live


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_an_id_that_is_remembered_ends_on_arrival(server: FakeEngineServer, stream: bool) -> None:
    assert await server.abort("a", "b", remember_unknown_for=Duration(seconds=60)) == [ABORT_OUTCOME_REMEMBERED] * 2
    call: Any = (
        server.stream(request_id="a", sampling={"n": 2})
        if stream
        else server.generate(request_id="a", sampling={"n": 2})
    )
    [response] = await collect(call) if stream else [await within(call)]
    assert response.request_id == "a"
    assert response.outputs == [generation_pb2.SequenceOutput(index=i, finish_reason=ABORT) for i in range(2)]
    assert response.usage == generation_pb2.Usage(prompt_tokens=3)
    assert server.core.idle
    # It was told ABORT, so that is what a late abort finds; and the memory is used up.
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]
    server.core.answer = [5]
    assert (await within(server.generate(request_id="a"))).outputs[0].finish_reason == LENGTH


async def test_an_abort_overtakes_also_what_comes_while_it_waits_for_the_engine(server: FakeEngineServer) -> None:
    server.core.confirmation.clear()
    live = server.generate(request_id="live")
    await server.core.next_request()
    abort = asyncio.create_task(server.abort("live", "late", remember_unknown_for=Duration(seconds=60)))
    # The call's end shows that the abort waits.
    await within(live)
    assert not abort.done()
    late = server.generate(request_id="late")
    assert (await within(late)).outputs == [generation_pb2.SequenceOutput(finish_reason=ABORT)]
    server.core.confirmation.set()
    assert await within(abort) == [ABORT_OUTCOME_ABORTED, ABORT_OUTCOME_REMEMBERED]
    # The memory is used up.
    server.core.answer = [5]
    assert (await within(server.generate(request_id="late"))).outputs[0].finish_reason == LENGTH


async def test_a_memory_ends(server: FakeEngineServer) -> None:
    assert await server.abort("a", remember_unknown_for=Duration(nanos=1)) == [ABORT_OUTCOME_REMEMBERED]
    server.core.answer = [5]
    assert (await within(server.generate(request_id="a"))).outputs[0].finish_reason == LENGTH


async def test_a_refused_request_does_not_use_the_memory_up(server: FakeEngineServer) -> None:
    await server.abort("a", remember_unknown_for=Duration(seconds=60))
    with pytest.raises(Exception, match="must be 1"):
        await within(server.generate(request_id="a", sampling={"n": 2, "temperature": 0.0}))
    assert (await within(server.generate(request_id="a"))).outputs[0].finish_reason == ABORT


async def test_an_abort_may_overtake_the_reuse_of_an_id(server: FakeEngineServer) -> None:
    server.core.answer = [5]
    await within(server.generate(request_id="a"))
    # Without remembering it, this is about the id's earlier life only.
    assert await server.abort("a") == [ABORT_OUTCOME_ALREADY_FINISHED]
    assert (await within(server.generate(request_id="a"))).outputs[0].finish_reason == LENGTH
    # With it, it is also about a request that is on its way.
    assert await server.abort("a", remember_unknown_for=Duration(seconds=60)) == [ABORT_OUTCOME_ALREADY_FINISHED]
    assert (await within(server.generate(request_id="a"))).outputs[0].finish_reason == ABORT
    # That was the request which the abort was for: repeating the abort remembers nothing.
    assert await server.abort("a", remember_unknown_for=Duration(seconds=60)) == [ABORT_OUTCOME_ABORTED]
    assert (await within(server.generate(request_id="a"))).outputs[0].finish_reason == LENGTH


async def test_an_abort_that_the_engine_makes_by_itself(server: FakeEngineServer) -> None:
    call = server.generate(request_id="a")
    request = await server.core.next_request()
    request.step(5, finish="abort")
    assert (await within(call)).outputs == [generation_pb2.SequenceOutput(token_ids=[5], finish_reason=ABORT)]
    assert await server.abort("a") == [ABORT_OUTCOME_ABORTED]


async def test_everything_at_once_for_a_drain(server: FakeEngineServer) -> None:
    calls = [server.generate() for _ in range(3)]
    await server.core.next_requests(3)
    assert await within(server.registry.abort_all()) == 3
    for call in calls:
        assert (await within(call)).outputs[0].finish_reason == ABORT
    await within(server.registry.idle())
    assert await server.registry.abort_all() == 0
