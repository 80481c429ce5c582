"""max_time ends a request OK, with what there is."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, collect, within
from tokenwire.v1 import generation_pb2
from tokenwire.v1.engine_service_pb2 import ABORT_OUTCOME_ALREADY_FINISHED, ABORT_OUTCOME_NOT_FOUND

TIME_LIMIT = generation_pb2.FINISH_REASON_TIME_LIMIT
LENGTH = generation_pb2.FINISH_REASON_LENGTH
SHORT = Duration(nanos=50_000_000)


@pytest.fixture(params=[True, False], ids=["direct", "ordinary"])
async def server(request: pytest.FixtureRequest, vllm_config: VllmConfig) -> Any:
    async with FakeEngineServer.run(vllm_config, direct_path=request.param) as running:
        yield running


async def test_a_unary_call(server: FakeEngineServer) -> None:
    call = server.generate(request_id="a", max_time=SHORT)
    request = await server.core.next_request()
    request.step(5, 6)
    response = await within(call)
    assert response.outputs == [generation_pb2.SequenceOutput(token_ids=[5, 6], finish_reason=TIME_LIMIT)]
    assert await server.core.next_abort() == [request.internal_id]
    assert server.core.idle
    assert await server.abort("a") == [ABORT_OUTCOME_ALREADY_FINISHED]


async def test_a_stream(server: FakeEngineServer) -> None:
    call = server.stream(max_time=SHORT)
    request = await server.core.next_request()
    request.step(5)
    messages = await collect(call)
    assert [token for message in messages for token in message.outputs[0].token_ids] == [5]
    assert messages[-1].outputs[0].finish_reason == TIME_LIMIT
    assert messages[-1].usage.completion_tokens == 1
    assert await server.core.next_abort() == [request.internal_id]


async def test_a_request_still_in_the_queue(server: FakeEngineServer) -> None:
    response = await within(server.generate(max_time=SHORT))
    assert response.outputs == [generation_pb2.SequenceOutput(finish_reason=TIME_LIMIT)]
    assert not server.core.live


async def test_sequences_that_have_ended_keep_their_own_reason(server: FakeEngineServer) -> None:
    call = server.generate(max_time=Duration(nanos=200_000_000), sampling={"n": 2})
    first, _ = await server.core.next_requests(2)
    first.step(5, finish="length")
    outputs = (await within(call)).outputs
    assert [output.finish_reason for output in outputs] == [LENGTH, TIME_LIMIT]


async def test_a_request_that_is_still_on_its_way_into_the_engine(server: FakeEngineServer) -> None:
    server.core.admission.clear()
    call = server.generate(max_time=Duration(nanos=1))
    request = await server.core.next_request()
    # A round trip, after which the time is over.
    assert await server.abort("other") == [ABORT_OUTCOME_NOT_FOUND]
    server.core.admission.set()
    response = await within(call)
    assert response.outputs[0].finish_reason == TIME_LIMIT
    assert await server.core.next_abort() == [request.internal_id]


async def test_a_request_that_ends_in_time(server: FakeEngineServer) -> None:
    call = server.generate(max_time=Duration(seconds=3600))
    request = await server.core.next_request()
    request.step(5, finish="length")
    assert (await within(call)).outputs[0].finish_reason == LENGTH
    assert server.core.idle


async def test_a_limit_of_many_years(server: FakeEngineServer) -> None:
    server.core.answer = [5]
    response = await within(server.generate(max_time=Duration(seconds=315_576_000_000)))
    assert response.outputs[0].finish_reason == LENGTH
