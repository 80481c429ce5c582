"""GetLoad: what it counts, on a server that may have served others before. Totals are compared before and after."""

import json

import grpc.aio
import pytest

import tokenwire
from harness import COMMAND, run
from harness.simulated import Simulated, generation_input, load_of, load_when, read_to_end, until, within
from tokenwire.v1 import engine_load_pb2
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

# The first test pays for the start.
pytestmark = pytest.mark.timeout(240)


async def idle(stub: EngineServiceStub) -> engine_load_pb2.RankLoad:
    """Wait until the statistics say that nothing runs."""

    def nothing_runs(load: engine_load_pb2.EngineLoad) -> bool:
        (rank,) = load.ranks
        return not (load.num_live_requests or rank.num_running_reqs or rank.num_waiting_reqs)

    return (await load_when(stub, nothing_runs)).ranks[0]


async def test_totals_are_exact(stub: EngineServiceStub) -> None:
    before = await idle(stub)
    message = generation_input("counted", range(2000, 2128), max_tokens=20)
    for _ in range(2):
        await within(stub.Generate(pb.GenerateRequest(input=message)))
    after = await idle(stub)
    assert after.prompt_tokens - before.prompt_tokens == 2 * 128
    assert after.generation_tokens - before.generation_tokens == 2 * 20
    assert after.prefix_cache_queries - before.prefix_cache_queries == 2 * 128
    # The second one found all blocks but the last, which must be computed for the first token.
    assert after.prefix_cache_hits - before.prefix_cache_hits == 112
    assert after.num_preemptions == before.num_preemptions


async def test_gauges_rise_and_fall_back_after_an_abort(simulated: Simulated, stub: EngineServiceStub) -> None:
    """What the last abort leaves is zero, though the engine makes no step after it."""
    await idle(stub)
    ids = [f"busy-{i}" for i in range(3)]
    calls = [stub.GenerateStream(pb.GenerateStreamRequest(input=generation_input(name))) for name in ids]
    for call in calls:
        await within(call.read())
    load = await load_of(stub)
    assert load.num_live_requests == 3
    assert load.ranks[0].num_running_reqs == 3
    assert not load.ranks[0].num_waiting_reqs
    assert 0 < load.ranks[0].kv_cache_usage < 1
    await within(stub.Abort(pb.AbortRequest(request_ids=ids)))
    for call in calls:
        await read_to_end(call)
    assert not (await idle(stub)).kv_cache_usage
    await until(lambda: not simulated.held())


async def test_what_waits_is_counted(stub: EngineServiceStub) -> None:
    await idle(stub)
    message = generation_input("many", n=64, temperature=1)
    running = stub.GenerateStream(pb.GenerateStreamRequest(input=message))
    await within(running.read())
    queued = stub.GenerateStream(pb.GenerateStreamRequest(input=generation_input("queued")))
    load = await load_when(stub, lambda load: load.ranks[0].num_waiting_reqs > 0)
    assert (load.num_live_requests, load.ranks[0].num_running_reqs, load.ranks[0].num_waiting_reqs) == (2, 64, 1)
    running.cancel()
    queued.cancel()
    await idle(stub)


async def test_the_client_says_the_same(simulated: Simulated, stub: EngineServiceStub) -> None:
    message = await load_of(stub)
    async with tokenwire.AsyncClient(simulated.address) as client:
        load = await client.engine_load(timeout=30)
    assert load == tokenwire.EngineLoad.from_proto(message)
    assert load.ranks[0].generation_tokens == message.ranks[0].generation_tokens


async def test_top_shows_a_busy_server(simulated: Simulated, channel: grpc.aio.Channel) -> None:
    stub = EngineServiceStub(channel)
    call = stub.GenerateStream(pb.GenerateStreamRequest(input=generation_input("watched", max_tokens=7000)))
    await within(call.read())
    finished = run(
        [COMMAND, "top", "--target", simulated.address, "--interval", "0.3", "--count", "3", "--json"], timeout=60
    )
    assert finished.exit_code == 0, finished.stderr
    first, *looks = [json.loads(line) for line in finished.stdout.splitlines()]
    assert first["generation_tokens_per_second"] is None
    assert len(looks) == 2
    for look in looks:
        assert (look["server"], look["rank"]) == (simulated.address, 0)
        assert look["num_running_reqs"] == look["num_live_requests"] == 1
        assert look["generation_tokens_per_second"] > 0
        assert look["kv_cache_usage"] > 0
    call.cancel()
    await idle(stub)
