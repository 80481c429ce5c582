"""GetLoad over an engine without statistics, as with --disable-log-stats; tests/simulated/test_load.py has the others."""

import grpc
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, failure_of, within
from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb


async def live(server: FakeEngineServer) -> int:
    load = (await within(server.stub.GetLoad(pb.GetLoadRequest()))).load
    assert not load.ranks
    return int(load.num_live_requests)


async def test_live_requests_are_counted_without_statistics(server: FakeEngineServer) -> None:
    assert await live(server) == 0
    call = server.generate(sampling={"n": 2})
    first, second = [await server.core.next_request() for _ in range(2)]
    assert await live(server) == 1
    first.step(5, finish="length")
    second.step(5, finish="length")
    await within(call)
    assert await live(server) == 0


async def test_while_the_engine_loads(vllm_config: VllmConfig) -> None:
    async with FakeEngineServer.run(vllm_config, ready=False) as server:
        failure = await failure_of(server.stub.GetLoad(pb.GetLoadRequest()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.ENGINE_LOADING)
