"""What GetEngineInfo says."""

from pathlib import Path

import pytest
import vllm
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from fake_engine import FakeEngineServer, make_config, within
from fake_engine.core import EOS, MAX_MODEL_LEN, MAX_NUM_SEQS, VOCAB_SIZE
from tokenwire import _version
from tokenwire._contract import CONTRACT_REVISION
from tokenwire.v1 import engine_info_pb2
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire_server.config import ServerConfig


async def info_of(server: FakeEngineServer) -> engine_info_pb2.EngineInfo:
    return (await within(server.stub.GetEngineInfo(pb.GetEngineInfoRequest()))).info


async def test_the_model_and_its_limits(vllm_config: VllmConfig) -> None:
    config = ServerConfig(port=0, max_receive_message_bytes=1_000_000, max_send_message_bytes=2_000_000)
    async with FakeEngineServer.run(vllm_config, server=config) as server:
        info = await info_of(server)
    assert info.model == vllm_config.model_config.model
    assert list(info.served_model_names) == [info.model]
    assert (info.max_model_len, info.vocab_size, info.dtype) == (MAX_MODEL_LEN, VOCAB_SIZE, "bfloat16")
    assert list(info.eos_token_ids) == [EOS]
    assert (info.limits.max_num_seqs, info.limits.max_logprobs) == (MAX_NUM_SEQS, 20)
    assert not info.limits.HasField("max_num_queued_reqs")
    assert not info.limits.HasField("max_num_queued_tokens")
    assert info.limits.max_receive_message_bytes == 1_000_000
    assert info.limits.max_send_message_bytes == 2_000_000
    assert info.parallelism == engine_info_pb2.Parallelism(
        data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
    )
    assert (info.contract_revision, info.tokenwire_version) == (CONTRACT_REVISION, _version.__version__)
    assert info.vllm_version == vllm.__version__
    assert not info.adapters


async def test_what_the_operator_has_set(tmp_path: Path) -> None:
    """FIELD_LOG 62."""
    config = make_config(
        tmp_path,
        served_model_name=["first", "second"],
        max_num_queued_reqs=5,
        max_num_queued_tokens=100,
        max_logprobs=-1,
        block_size=32,
        enable_lora=True,
        scheduling_policy="priority",
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"},
    )
    adapter = LoRARequest("german", 1, "/adapters/german")
    async with FakeEngineServer.run(config, keep_tokenizer=True, adapters=[adapter]) as server:
        info = await info_of(server)
    assert info.served_model_names[0] == "first"
    assert info.limits.max_num_queued_reqs == 5
    assert info.limits.max_num_queued_tokens == 100
    assert info.limits.max_logprobs == VOCAB_SIZE
    assert info.kv_cache.block_size == 32
    assert list(info.kv_cache.kv_events_endpoints) == ["tcp://*:5557"]
    assert [(adapter.name, adapter.path) for adapter in info.adapters] == [("german", "/adapters/german")]
    assert {"lora", "priority", "structured_outputs"} <= set(info.features)


async def test_each_name_of_the_model_may_be_used(tmp_path: Path) -> None:
    async with FakeEngineServer.run(make_config(tmp_path, served_model_name=["first", "second"])) as server:
        server.core.answer = [5]
        for name in (await info_of(server)).served_model_names:
            assert (await within(server.generate(model=name))).outputs


@pytest.mark.parametrize("seed", [None, "0", "17"])
async def test_the_seed_of_block_hashes(
    server: FakeEngineServer, monkeypatch: pytest.MonkeyPatch, seed: str | None
) -> None:
    """FIELD_LOG 62."""
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    cache = (await info_of(server)).kv_cache
    assert (cache.hash_seed if cache.HasField("hash_seed") else None) == seed
    assert cache.prefix_caching_hash_algo == "sha256"
