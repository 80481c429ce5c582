"""A full queue refuses before any work, n counts as n, and a prefill done elsewhere is not left behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import grpc
import pytest
from vllm.config import KVTransferConfig, VllmConfig

from fake_engine import FakeEngineServer, collect, failure_of, make_config, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import FINISH_REASON_ABORT, GenerationInput
from tokenwire.v1.multiplex_pb2 import MultiplexSubmit
from tokenwire.v1.sampling_params_pb2 import SamplingParams
from tokenwire_server.conversion import request as conversion
from tokenwire_server.requests.server_state import State

RETRY = (grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL", 1.0)


@pytest.fixture
async def limited(tmp_path: Any) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(make_config(tmp_path, max_num_queued_reqs=4)) as server:
        yield server


async def refusal(server: FakeEngineServer, n: int) -> Any:
    failure = await failure_of(server.generate(sampling={"n": n}))
    return failure.code, failure.reason, failure.retry_delay


async def test_n_sequences_take_n_places(limited: FakeEngineServer) -> None:
    """FIELD_LOG 52."""
    four = asyncio.create_task(limited.stream(sampling={"n": 4}).read())
    sequences = await limited.core.next_requests(4)
    assert await refusal(limited, 1) == RETRY
    sequences[0].step(5, finish="length")
    # The place is free once the output has come through.
    await within(four)
    one = limited.generate()
    sequences.append(await limited.core.next_request())
    assert await refusal(limited, 1) == RETRY
    for sequence in sequences[1:]:
        sequence.step(5, finish="length")
    await within(one)


async def test_n_that_needs_more_places_than_are_free(limited: FakeEngineServer) -> None:
    one = limited.generate()
    request = await limited.core.next_request()
    assert await refusal(limited, 4) == RETRY
    three = limited.generate(sampling={"n": 3})
    for sequence in (request, *await limited.core.next_requests(3)):
        sequence.step(5, finish="length")
    await within(one)
    await within(three)


async def test_n_that_never_fits_is_no_matter_of_waiting(limited: FakeEngineServer) -> None:
    failure = await failure_of(limited.generate(sampling={"n": 5}))
    assert (failure.reason, failure.fields) == ("INVALID_FIELD", ("input.sampling_params.n",))
    assert "max_num_queued_reqs, 4" in failure.message


async def test_a_full_queue_refuses_before_the_prompt_is_converted(limited: FakeEngineServer) -> None:
    """FIELD_LOG 53."""
    four = limited.generate(sampling={"n": 4})
    sequences = await limited.core.next_requests(4)
    with mock.patch.object(conversion, "_prompt", side_effect=AssertionError) as check:
        assert await refusal(limited, 1) == RETRY
    assert not check.called
    for sequence in sequences:
        sequence.step(5, finish="length")
    await within(four)


# A decode engine whose prefill engine waits to be told that its blocks are free.

REMOTE = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [1, 2]}
KV = json.dumps(REMOTE)


@pytest.fixture(scope="module")
def decode_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    return make_config(tmp_path_factory.mktemp("model"), kv_transfer_config=connector, max_num_queued_reqs=4)


@pytest.fixture
async def decode(decode_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(decode_config) as server:
        yield server


async def released(server: FakeEngineServer) -> list[dict[str, Any]]:
    """Return the parameters of which the engine was told, and forget them."""
    for _ in range(5):
        await asyncio.sleep(0)
    found = [request.sampling_params.extra_args["kv_transfer_params"] for request in server.core.released]
    server.core.released.clear()
    return found


BAD: dict[str, dict[str, Any]] = {
    "a bad parameter": {"sampling": {"top_p": 2.0}},
    "a bad id": {"request_id": "a b"},
    "no prompt": {"prompt": []},
    "a bad prompt": {"prompt": [10**6]},
    "an unknown model": {"model": "other"},
    "two sequences": {"sampling": {"n": 2}},
    "a rank that is not there": {"data_parallel_rank": 7},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_a_refused_request_lets_go_of_its_prefill(
    decode: FakeEngineServer, fields: dict[str, Any], stream: bool
) -> None:
    """FIELD_LOG 41."""
    call = decode.stream(**fields, kv_transfer_params_json=KV) if stream else None
    awaitable = call.read() if call is not None else decode.generate(**fields, kv_transfer_params_json=KV)
    assert (await failure_of(awaitable)).code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert await released(decode) == [REMOTE]
    await decode.check_alive()


async def test_so_does_one_of_a_multiplex_stream(decode: FakeEngineServer) -> None:
    call = decode.stub.Multiplex()
    message = GenerationInput(
        prompt_token_ids=[1], sampling_params=SamplingParams(top_p=2.0), kv_transfer_params_json=KV
    )
    await call.write(pb.MultiplexRequest(submit=MultiplexSubmit(handle=1, input=message)))
    answer = await within(call.read())
    assert isinstance(answer, pb.MultiplexResponse)
    assert len(answer.step.rejected) == 1
    assert await released(decode) == [REMOTE]
    call.cancel()


async def test_so_does_one_that_finds_the_queue_full(decode: FakeEngineServer) -> None:
    """FIELD_LOG 41."""
    four = decode.generate(sampling={"n": 4})
    sequences = await decode.core.next_requests(4)
    failure = await failure_of(decode.generate(kv_transfer_params_json=KV))
    assert (failure.code, failure.reason, failure.retry_delay) == RETRY
    assert await released(decode) == [REMOTE]
    for sequence in sequences:
        sequence.step(5, finish="length")
    await within(four)


async def test_so_does_one_with_a_live_id(decode: FakeEngineServer) -> None:
    live = decode.generate(request_id="a", kv_transfer_params_json=KV)
    request = await decode.core.next_request()
    failure = await failure_of(decode.generate(request_id="a", kv_transfer_params_json=KV))
    assert failure.reason == "DUPLICATE_REQUEST_ID"
    [told] = decode.core.released
    assert told.request_id not in {"a", request.internal_id}
    assert await released(decode) == [REMOTE]
    request.step(5, finish="length")
    await within(live)
    # This one has run, so the connector knows by itself.
    assert await released(decode) == []


async def test_so_does_one_that_was_aborted_before_it_arrived(decode: FakeEngineServer) -> None:
    assert await decode.abort("a", remember_unknown_for={"seconds": 10}) == [pb.ABORT_OUTCOME_REMEMBERED]
    response = await within(decode.generate(request_id="a", kv_transfer_params_json=KV))
    assert response.outputs[0].finish_reason == FINISH_REASON_ABORT
    assert await released(decode) == [REMOTE]


async def test_so_does_one_that_a_draining_server_refuses(decode: FakeEngineServer) -> None:
    decode.state.enter(State.DRAINING)
    assert (await failure_of(decode.generate(kv_transfer_params_json=KV))).reason == "DRAINING"
    assert await released(decode) == [REMOTE]


async def test_one_that_is_cancelled_on_its_way_into_the_engine_is_aborted_there(decode: FakeEngineServer) -> None:
    """FIELD_LOG 39, 41."""
    decode.core.admission.clear()
    call = decode.generate(kv_transfer_params_json=KV)
    request = await decode.core.next_request()
    call.cancel()
    assert await decode.core.next_abort() == [request.internal_id]
    decode.core.admission.set()
    assert await released(decode) == []


async def test_the_parameters_may_stand_among_the_extra_arguments(decode: FakeEngineServer) -> None:
    sampling = {"extra_args_json": json.dumps({"kv_transfer_params": REMOTE}), "top_p": 2.0}
    assert (await failure_of(decode.generate(sampling=sampling))).fields == ("input.sampling_params.top_p",)
    assert await released(decode) == [REMOTE]


@pytest.mark.parametrize("text", ["{}", '{"do_remote_prefill": false}', '{"do_remote_decode": true}', "{", "[]"])
async def test_nothing_is_told_where_nothing_was_prefilled(decode: FakeEngineServer, text: str) -> None:
    await failure_of(decode.generate([], kv_transfer_params_json=text))
    assert await released(decode) == []


async def test_nothing_is_told_to_an_engine_without_a_connector(server: FakeEngineServer) -> None:
    await failure_of(server.generate([], kv_transfer_params_json=KV))
    assert await released(server) == []


@pytest.mark.parametrize("key", ["do_remote_prefill", "do_remote_decode"])
async def test_several_sequences_cannot_share_a_transfer(decode: FakeEngineServer, key: str) -> None:
    """FIELD_LOG 40."""
    failure = await failure_of(decode.generate(sampling={"n": 2}, kv_transfer_params_json=json.dumps({key: True})))
    assert (failure.reason, failure.fields) == ("INVALID_FIELD", ("input.sampling_params.n",))


@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
async def test_what_the_connector_gives_comes_back_on_every_rpc(decode_config: VllmConfig, direct_path: bool) -> None:
    """FIELD_LOG 30, S7."""
    async with FakeEngineServer.run(decode_config, direct_path=direct_path) as server:
        multiplex = server.stub.Multiplex()
        submit = MultiplexSubmit(handle=1, input=GenerationInput(prompt_token_ids=[1]))
        await multiplex.write(pb.MultiplexRequest(submit=submit))
        await multiplex.done_writing()
        stream, unary = server.stream(), server.generate()
        reading = asyncio.gather(collect(multiplex), collect(stream), within(unary))
        for request in await server.core.next_requests(3):
            request.step(5)
            values: dict[str, Any] = {"kv_transfer_params": {"port": 5600}, "ec_transfer_params": {"a": [1.5, None]}}
            request.step(6, finish="length", **values)
        steps, messages, response = await reading
    [finished] = [finish for step in steps for finish in step.step.finished]
    for message in (response, messages[-1], finished):
        assert message.kv_transfer_params_json == '{"port": 5600}'
        assert message.ec_transfer_params_json == '{"a": [1.5, null]}'
    assert not any(message.HasField("kv_transfer_params_json") for message in messages[:-1])
