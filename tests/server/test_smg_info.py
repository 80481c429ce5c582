"""What VllmEngine's methods say of the model, the server and its load."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, make_config, within
from tokenwire.v1 import engine_info_pb2, engine_load_pb2
from tokenwire_server.config import ServerConfig
from tokenwire_server.services.smg.loads import Loads

SMG = ServerConfig(port=0, smg=True)


@pytest.fixture
async def server(vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(vllm_config, server=SMG, served_model_names=["first", "second"]) as running:
        yield running


@pytest.fixture
def stub(server: FakeEngineServer) -> Any:
    return VllmEngineStub(server.channel)


async def test_model_info(vllm_config: VllmConfig, stub: Any) -> None:
    model = vllm_config.model_config.model
    assert await within(stub.GetModelInfo(smg.GetModelInfoRequest())) == smg.GetModelInfoResponse(
        model_path=model,
        is_generation=True,
        max_context_length=64,
        vocab_size=1000,
        served_model_name="first",
        tokenizer_path=model,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[2],
        bos_token_id=1,
        max_req_input_len=63,
    )


async def test_server_info(server: FakeEngineServer, stub: Any) -> None:
    call = server.generate()
    request = await server.core.next_request()
    info = await within(stub.GetServerInfo(smg.GetServerInfoRequest()))
    assert 0 < info.uptime_seconds < 1000
    info.ClearField("uptime_seconds")
    assert info == smg.GetServerInfoResponse(
        active_requests=1,
        server_type="vllm-grpc",
        data_parallel_size=1,
        kv_cache_dtype="auto",
        block_size=info.block_size,
        model_dtype="torch.bfloat16",
        max_num_seqs=8,
        constrained_decoding_start="first_token",
    )
    assert info.block_size == server.engine.info().kv_cache.block_size > 0
    request.step(5, finish="length")
    await within(call)


async def test_server_info_for_disaggregation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_PAIRING_PROTOCOL", "blue")
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer", "engine_id": "e1"}
    structured = {"reasoning_parser": "deepseek_r1"}
    config = make_config(tmp_path, kv_transfer_config=connector, structured_outputs_config=structured)
    async with FakeEngineServer.run(config, server=SMG) as server:
        info = await within(VllmEngineStub(server.channel).GetServerInfo(smg.GetServerInfoRequest()))
    assert (info.kv_connector, info.kv_role, info.kv_engine_id) == ("ExampleConnector", "kv_producer", "e1")
    assert info.pairing_protocol == "blue"
    assert (info.engine_reasoning_parser, info.constrained_decoding_start) == ("deepseek_r1", "after_reasoning")


async def test_loads_without_statistics(server: FakeEngineServer, stub: Any) -> None:
    call = server.generate()
    request = await server.core.next_request()
    response = await within(stub.GetLoads(smg.GetLoadsRequest()))
    assert (response.dp_rank_count, response.version) == (1, server.engine.info().vllm_version)
    assert response.timestamp.endswith("+00:00")
    assert not (await within(stub.GetLoads(smg.GetLoadsRequest(dp_rank=1)))).loads
    [load] = response.loads
    assert (load.dp_rank, load.num_running_reqs, load.num_total_reqs, load.max_running_requests) == (0, 1, 1, 8)
    request.step(5, finish="length")
    await within(call)


INFO = engine_info_pb2.EngineInfo(vllm_version="1")
INFO.parallelism.data_parallel_size = 2
INFO.limits.max_num_seqs = 8
INFO.kv_cache.num_blocks = 100
INFO.kv_cache.block_size = 16


def rank_load(rank: int, **fields: Any) -> engine_load_pb2.RankLoad:
    return engine_load_pb2.RankLoad(data_parallel_rank=rank, **fields)


def test_loads_of_each_rank() -> None:
    load = engine_load_pb2.EngineLoad(
        num_live_requests=9,
        ranks=[
            rank_load(
                0,
                num_running_reqs=2,
                num_waiting_reqs=5,
                kv_cache_usage=0.25,
                prefix_cache_queries=100,
                prefix_cache_hits=75,
            ),
            rank_load(1),
        ],
    )
    response = Loads().response(INFO, load, None)
    assert response.dp_rank_count == 2
    assert list(response.loads) == [
        smg.SchedulerLoad(
            num_running_reqs=2,
            num_waiting_reqs=5,
            num_total_reqs=7,
            num_used_tokens=400,
            max_total_num_tokens=1600,
            token_usage=0.25,
            cache_hit_rate=0.75,
            utilization=0.25,
            max_running_requests=8,
        ),
        smg.SchedulerLoad(dp_rank=1, max_total_num_tokens=1600, max_running_requests=8),
    ]
    assert [one.dp_rank for one in Loads().response(INFO, load, 1).loads] == [1]


def test_throughput_is_that_since_the_reading_before() -> None:
    now = 100.0
    loads = Loads(clock=lambda: now)

    def throughput(seconds: float, tokens: int) -> float:
        nonlocal now
        now = seconds
        load = engine_load_pb2.EngineLoad(ranks=[rank_load(0, generation_tokens=tokens), rank_load(1)])
        first, second = loads.response(INFO, load, None).loads
        assert second.gen_throughput == 0
        rate: float = first.gen_throughput
        return rate

    assert throughput(100.0, 50) == 0
    assert throughput(102.0, 90) == 20
    # Too soon for another.
    assert throughput(102.5, 95) == 20
    assert throughput(112.0, 190) == 10
