"""What VllmEngine's GetModelInfo and GetServerInfo say."""

import json
import os
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as smg

from tokenwire.v1 import engine_info_pb2 as pb
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.conversion.model_info import EngineFacts

_SERVER_TYPE = "vllm-grpc"
"""What coordinators know servers of VllmEngine by."""
_PAIRING_PROTOCOL = "SMG_PAIRING_PROTOCOL"
"""Variable in which an operator says which prefill and decode servers fit together."""


def model_info(info: pb.EngineInfo, facts: EngineFacts, limits: RequestLimits) -> Any:
    """Describe the model; the sampling defaults are for the coordinator to apply."""
    return smg.GetModelInfoResponse(
        model_path=info.model,
        is_generation=True,
        max_context_length=limits.max_model_len,
        vocab_size=limits.vocab_size,
        # Whatever the model could do: this server takes token ids only.
        supports_vision=False,
        served_model_name=info.served_model_names[0],
        tokenizer_path=facts.tokenizer,
        model_type=facts.model_type,
        architectures=facts.architectures,
        eos_token_ids=info.eos_token_ids,
        pad_token_id=facts.pad_token_id or 0,
        bos_token_id=facts.bos_token_id or 0,
        # One token must be left for the output.
        max_req_input_len=limits.max_model_len - 1,
        default_sampling_params_json=json.dumps(limits.defaults) if limits.defaults else "",
    )


def server_info(info: pb.EngineInfo, facts: EngineFacts, *, num_live_requests: int, uptime_seconds: float) -> Any:
    """Describe the server; what concerns images and the like stays unset."""
    cache = info.kv_cache
    return smg.GetServerInfoResponse(
        active_requests=num_live_requests,
        uptime_seconds=uptime_seconds,
        server_type=_SERVER_TYPE,
        kv_connector=cache.kv_connector,
        kv_role=cache.kv_role,
        kv_engine_id=facts.kv_engine_id or "",
        data_parallel_size=info.parallelism.data_parallel_size,
        kv_cache_dtype=facts.kv_cache_dtype,
        block_size=cache.block_size,
        attention_backend=facts.attention_backend or "",
        model_dtype=f"torch.{info.dtype}",
        pairing_protocol=os.environ.get(_PAIRING_PROTOCOL, ""),
        max_num_seqs=info.limits.max_num_seqs,
        engine_reasoning_parser=facts.reasoning_parser or "",
        constrained_decoding_start="after_reasoning" if facts.grammar_after_reasoning else "first_token",
    )
