"""Ids belong to live requests only, and each is compared as a whole."""

import grpc
import pytest

from fake_engine import FakeEngineServer, collect, failure_of, read, within
from tokenwire.v1 import generation_pb2


@pytest.mark.parametrize("second", ["unary", "stream"])
async def test_a_live_id_is_refused_and_its_request_goes_on(server: FakeEngineServer, second: str) -> None:
    """FIELD_LOG 28."""
    call = server.generate(request_id="a")
    request = await server.core.next_request()
    again = server.generate(request_id="a") if second == "unary" else server.stream(request_id="a").read()
    failure = await failure_of(again)
    assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    assert failure.fields == ("input.request_id",)
    request.step(5, finish="length")
    response = await within(call)
    assert (response.request_id, list(response.outputs[0].token_ids)) == ("a", [5])
    assert server.core.idle


async def test_the_id_of_a_finished_request_is_free_once_its_caller_knows(server: FakeEngineServer) -> None:
    server.core.answer = [5]
    for _ in range(100):
        assert (await within(server.generate(request_id="a"))).request_id == "a"
    for _ in range(100):
        call = server.stream(request_id="a")
        while not (await read(call)).outputs[0].finish_reason:
            pass
    # Whatever the server still cleaned up, it aborted none of the later ones.
    assert server.core.idle


async def test_the_id_of_a_refused_request_is_free(server: FakeEngineServer) -> None:
    server.core.refusal = RuntimeError("a bug")
    await failure_of(server.generate(request_id="a"))
    server.core.refusal = None
    server.core.answer = [5]
    await within(server.generate(request_id="a"))


async def test_a_cancelled_request_takes_no_later_one_of_its_id_with_it(server: FakeEngineServer) -> None:
    first = server.stream(request_id="a")
    first_request = await server.core.next_request()
    first.cancel()
    assert await server.core.next_abort() == [first_request.internal_id]
    second = server.stream(request_id="a")
    second_request = await server.core.next_request()
    assert second_request.internal_id != first_request.internal_id
    second_request.step(5, finish="length")
    [message] = await collect(second)
    assert message.outputs[0].finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert server.core.idle


async def test_the_ids_of_many_live_requests_are_told_apart(server: FakeEngineServer) -> None:
    ids = ["a", "A", "a-", "a-0", "0_a", "aa"]
    calls = {}
    for request_id in ids:
        calls[request_id] = server.generate(request_id=request_id)
        (await server.core.next_request()).step(len(calls), finish="length")
    for number, request_id in enumerate(ids, 1):
        response = await within(calls[request_id])
        assert (response.request_id, list(response.outputs[0].token_ids)) == (request_id, [number])
