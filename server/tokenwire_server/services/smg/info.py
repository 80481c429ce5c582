"""The responses of VllmEngine's GetModelInfo and GetServerInfo."""

import json
import os
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as smg

from tokenwire.v1 import engine_info_pb2 as pb
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.conversion.model_info import ModelInfo

_SERVER_TYPE = "vllm-grpc"
"""The `server_type` by which coordinators recognize a VllmEngine server."""
_PAIRING_PROTOCOL = "SMG_PAIRING_PROTOCOL"
"""Environment variable with which an operator labels the prefill and decode servers that can be paired."""


def model_info(info: pb.EngineInfo, model: ModelInfo, limits: RequestLimits) -> Any:
    """Return the response to GetModelInfo. The coordinator is expected to apply the default sampling parameters.

    Args:
        info: the contract's description of the engine.
        model: the properties that it does not contain.
        limits: what requests are checked against.

    """
    return smg.GetModelInfoResponse(
        model_path=info.model,
        is_generation=True,
        max_context_length=limits.max_model_len,
        vocab_size=limits.vocab_size,
        # This server accepts token ids only, even if the model is multimodal.
        supports_vision=False,
        served_model_name=info.served_model_names[0],
        tokenizer_path=model.tokenizer,
        model_type=model.model_type,
        architectures=model.architectures,
        eos_token_ids=info.eos_token_ids,
        pad_token_id=model.pad_token_id or 0,
        bos_token_id=model.bos_token_id or 0,
        # At least one token must remain for the output.
        max_req_input_len=limits.max_model_len - 1,
        default_sampling_params_json=json.dumps(limits.defaults) if limits.defaults else "",
    )


def server_info(info: pb.EngineInfo, model: ModelInfo, *, num_live_requests: int, uptime_seconds: float) -> Any:
    """Return the response to GetServerInfo; its multimodal fields stay unset.

    Args:
        info: the contract's description of the engine.
        model: the properties that it does not contain.
        num_live_requests: number of requests that have not ended.
        uptime_seconds: seconds since the server started.

    """
    cache = info.kv_cache
    return smg.GetServerInfoResponse(
        active_requests=num_live_requests,
        uptime_seconds=uptime_seconds,
        server_type=_SERVER_TYPE,
        kv_connector=cache.kv_connector,
        kv_role=cache.kv_role,
        kv_engine_id=model.kv_engine_id or "",
        data_parallel_size=info.parallelism.data_parallel_size,
        kv_cache_dtype=model.kv_cache_dtype,
        block_size=cache.block_size,
        attention_backend=model.attention_backend or "",
        model_dtype=f"torch.{info.dtype}",
        pairing_protocol=os.environ.get(_PAIRING_PROTOCOL, ""),
        max_num_seqs=info.limits.max_num_seqs,
        engine_reasoning_parser=model.reasoning_parser or "",
        constrained_decoding_start="after_reasoning" if model.grammar_after_reasoning else "first_token",
    )
