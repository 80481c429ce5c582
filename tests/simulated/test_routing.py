"""Where and when a request runs: two data-parallel ranks, priorities, and prefixes that are shared or not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from harness.simulated import VOCABULARY, Simulated, generation_input, read_to_end, serving, submit, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.simulated_device.formula import expected_tokens
from tokenwire_server.simulated_device.step_log import belongs

# The first test pays for the start.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Two ranks, each with places for two requests."""
    arguments = ["--data-parallel-size", "2", "--scheduling-policy", "priority", "--max-num-seqs", "2"]
    with serving(tmp_path_factory.mktemp("ranks"), *arguments) as simulated:
        yield simulated


@pytest.fixture
async def stub(ranks: Simulated) -> AsyncIterator[EngineServiceStub]:
    async with ranks.connect() as channel:
        yield EngineServiceStub(channel)


def routed(request_id: str, max_tokens: int = 4, prompt: Any = range(100, 228), **fields: Any) -> GenerationInput:
    message = generation_input(request_id, prompt, max_tokens=max_tokens)
    message.MergeFrom(GenerationInput(**fields))
    return message


async def generate(stub: EngineServiceStub, message: GenerationInput) -> pb.GenerateResponse:
    response: pb.GenerateResponse = await within(stub.Generate(pb.GenerateRequest(input=message)))
    return response


def ranks_of(ranks: Simulated, request_id: str) -> set[int]:
    return {step.rank for step in ranks.steps() if step.computes(request_id)}


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_request_runs_on_the_rank_that_it_names(ranks: Simulated, stub: EngineServiceStub, rank: int) -> None:
    ids = [f"rank{rank}-{i}" for i in range(3)]
    await asyncio.gather(*(generate(stub, routed(request_id, data_parallel_rank=rank)) for request_id in ids))
    assert [ranks_of(ranks, request_id) for request_id in ids] == [{rank}] * 3


async def test_without_a_rank_the_engine_balances(ranks: Simulated, stub: EngineServiceStub) -> None:
    """FIELD_LOG 48."""
    ids = [f"any-{i}" for i in range(4)]
    prompts = [range(100 + i, 228) for i in range(4)]
    responses = await asyncio.gather(
        *(generate(stub, routed(request_id, 40, prompt)) for request_id, prompt in zip(ids, prompts, strict=True))
    )
    for response, prompt in zip(responses, prompts, strict=True):
        assert response.outputs[0].token_ids == expected_tokens(list(prompt), 40, vocab_size=VOCABULARY)
    assert set.union(*(ranks_of(ranks, request_id) for request_id in ids)) == {0, 1}


async def test_the_load_of_each_rank(stub: EngineServiceStub) -> None:
    before = (await within(stub.GetLoad(pb.GetLoadRequest()))).load
    assert [rank.data_parallel_rank for rank in before.ranks] == [0, 1]
    await generate(stub, routed("loaded-1", 40, data_parallel_rank=1))
    after = (await within(stub.GetLoad(pb.GetLoadRequest()))).load
    growth = [new.generation_tokens - old.generation_tokens for old, new in zip(before.ranks, after.ranks, strict=True)]
    assert growth == [0, 40]


async def test_an_abort_reaches_each_rank(ranks: Simulated, stub: EngineServiceStub) -> None:
    streams = {
        f"endless-{rank}": stub.GenerateStream(
            pb.GenerateStreamRequest(input=routed(f"endless-{rank}", 4000, data_parallel_rank=rank))
        )
        for rank in (0, 1)
    }
    for stream in streams.values():
        await within(stream.read())
    response = await within(stub.Abort(pb.AbortRequest(request_ids=streams)))
    assert [result.outcome for result in response.results] == [pb.ABORT_OUTCOME_ABORTED] * 2
    await asyncio.gather(*map(read_to_end, streams.values()))
    await ranks.gone(*streams)


async def test_the_lower_priority_number_runs_first(ranks: Simulated, stub: EngineServiceStub) -> None:
    # Both places of the rank are taken by what nothing outranks.
    messages = [routed(f"running-{i}", 4000, priority=-10, data_parallel_rank=0) for i in range(2)]
    running = [stub.GenerateStream(pb.GenerateStreamRequest(input=message)) for message in messages]
    for call in running:
        await within(call.read())
    waiting = {"late": 5, "unset": 0, "early": -5}
    multiplex: Any = stub.Multiplex()
    for handle, (request_id, priority) in enumerate(waiting.items()):
        await multiplex.write(submit(handle, routed(request_id, 1, priority=priority, data_parallel_rank=0)))
    await multiplex.done_writing()
    accepted = 0
    while accepted < len(waiting):
        message = await within(multiplex.read())
        assert isinstance(message, pb.MultiplexResponse)
        accepted += len(message.step.accepted)
    # One place becomes free: they go one after the other.
    running[0].cancel()
    await read_to_end(multiplex)
    order = [
        request_id
        for step in ranks.steps()
        for internal in step.prefill
        for request_id in waiting
        if belongs(internal, request_id)
    ]
    assert order == ["early", "unset", "late"]
    running[1].cancel()
    await ranks.gone("running-1")


async def cached(stub: EngineServiceStub, request_id: str, prompt: Any, **fields: Any) -> int:
    response = await generate(stub, routed(request_id, 2, prompt, data_parallel_rank=1, **fields))
    return response.usage.cached_tokens


async def test_a_cache_salt_keeps_prefixes_apart(stub: EngineServiceStub) -> None:
    prompt = range(1000, 1129)
    assert await cached(stub, "first", prompt) == 0
    assert await cached(stub, "again", prompt) == 128
    assert await cached(stub, "salted", prompt, cache_salt="tenant") == 0
    assert await cached(stub, "salted-again", prompt, cache_salt="tenant") == 128
    assert await cached(stub, "other", prompt, cache_salt="other tenant") == 0


async def test_a_session_is_no_hindrance(stub: EngineServiceStub) -> None:
    response = await generate(stub, routed("session", 2, session_id="a session"))
    assert len(response.outputs[0].token_ids) == 2


async def test_engine_info_tells_what_there_is_to_route_by(stub: EngineServiceStub) -> None:
    info = (await within(stub.GetEngineInfo(pb.GetEngineInfoRequest()))).info
    assert info.parallelism.data_parallel_size == 2
    assert "priority" in info.features
    assert info.kv_cache.prefix_caching
