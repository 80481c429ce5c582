"""The EngineInfo that GetEngineInfo returns."""

import os
from collections.abc import Iterable

import vllm
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from tokenwire import _version
from tokenwire._contract import CONTRACT_REVISION
from tokenwire.v1 import engine_info_pb2 as pb
from tokenwire_server.conversion.limits import RequestLimits


def engine_info(
    config: VllmConfig, limits: RequestLimits, *, eos_token_id: int | None, adapters: Iterable[LoRARequest]
) -> pb.EngineInfo:
    """Return the EngineInfo of an engine.

    Args:
        config: the engine's configuration, after the engine is ready: the KV cache size is known only then.
        limits: what requests are checked against.
        eos_token_id: the tokenizer's EOS id, listed before those of generation_config.json; None without one.
        adapters: the loaded LoRA adapters.

    """
    model = config.model_config
    info = pb.EngineInfo(
        model=model.model,
        served_model_names=limits.served_model_names,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=_eos_ids(config, eos_token_id),
        dtype=str(model.dtype).removeprefix("torch."),
        contract_revision=CONTRACT_REVISION,
        features=_features(config, limits),
        tokenwire_version=_version.__version__,
        vllm_version=vllm.__version__,
    )
    for adapter in adapters:
        info.adapters.add(name=adapter.lora_name, path=adapter.lora_path)
    scheduler = config.scheduler_config
    info.limits.max_num_seqs = limits.max_num_seqs
    info.limits.max_num_batched_tokens = scheduler.max_num_batched_tokens
    info.limits.max_logprobs = limits.max_logprobs
    if scheduler.max_num_queued_reqs is not None:
        info.limits.max_num_queued_reqs = scheduler.max_num_queued_reqs
    if scheduler.max_num_queued_tokens is not None:
        info.limits.max_num_queued_tokens = scheduler.max_num_queued_tokens
    parallel = config.parallel_config
    info.parallelism.data_parallel_size = parallel.data_parallel_size
    info.parallelism.tensor_parallel_size = parallel.tensor_parallel_size
    info.parallelism.pipeline_parallel_size = parallel.pipeline_parallel_size
    _fill_kv_cache(info.kv_cache, config)
    return info


def _fill_kv_cache(message: pb.KvCache, config: VllmConfig) -> None:
    cache = config.cache_config
    if cache.block_size is not None:
        message.block_size = cache.block_size
    if cache.num_gpu_blocks is not None:
        message.num_blocks = cache.num_gpu_blocks // config.parallel_config.data_parallel_size
    if cache.enable_prefix_caching is not None:
        message.prefix_caching = cache.enable_prefix_caching
    message.prefix_caching_hash_algo = cache.prefix_caching_hash_algo
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        message.hash_seed = seed
    if (transfer := config.kv_transfer_config) is not None and transfer.kv_connector is not None:
        message.kv_connector = transfer.kv_connector
        if transfer.kv_role is not None:
            message.kv_role = transfer.kv_role
    if (events := config.kv_events_config) is not None and events.enable_kv_cache_events:
        message.kv_events_endpoints.append(events.endpoint)


def _eos_ids(config: VllmConfig, first: int | None) -> list[int]:
    more = config.model_config.try_get_generation_config().get("eos_token_id")
    ids = [] if more is None else [more] if isinstance(more, int) else list(more)
    return list(dict.fromkeys([*([] if first is None else [first]), *ids]))


def _features(config: VllmConfig, limits: RequestLimits) -> list[str]:
    features = ["abort_remember", "load", "max_time", "multiplex"]
    if limits.has_tokenizer:
        features.append("structured_outputs")
    if config.lora_config is not None:
        features.append("lora")
    if limits.priority_scheduling:
        features.append("priority")
    if config.reasoning_config is not None and config.reasoning_config.enabled:
        features.append("thinking_token_budget")
    if config.model_config.enable_trace_replay:
        features.append("trace_replay")
    return sorted(features)
