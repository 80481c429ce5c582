"""An abort while a remote prefill is being fetched: vLLM holds the memory until the transfer is over, and goes on.

So tokenwire aborts at once; it need not wait for the first token, as front ends of older engines do.
"""

from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from fake_engine import make_config

BLOCK_SIZE = 16


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    connector = KVTransferConfig(
        kv_connector="FetchingConnector", kv_role="kv_consumer", kv_connector_module_path="fake_engine.connector"
    )
    config = make_config(tmp_path, kv_transfer_config=connector, block_size=BLOCK_SIZE)
    config.cache_config.num_gpu_blocks = 100
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)
    return Scheduler(config, cache, StructuredOutputManager(config), BLOCK_SIZE)


def step(scheduler: Scheduler, *received: str) -> None:
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[5]] * len(ids),
            kv_connector_output=KVConnectorOutput(finished_recving=set(received)),
        ),
    )


def test_an_abort_while_a_remote_prefill_is_fetched(scheduler: Scheduler) -> None:
    """FIELD_LOG 39."""
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    before = free()
    params = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    params.update_from_generation_config({}, eos_token_id=2)
    scheduler.add_request(Request("a", list(range(40)), params, None))
    step(scheduler)
    assert scheduler.requests["a"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert free() == before - 3
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    # Into these blocks the transfer still writes.
    assert free() == before - 3
    step(scheduler, "a")
    assert free() == before
    assert not scheduler.requests
    step(scheduler)
