"""From the contract's GenerationInput to what AsyncLLM.add_request takes."""

import array
import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_hints import KvHintsEnvelope

from tokenwire._contract import Reason
from tokenwire.v1 import generation_pb2
from tokenwire_server.conversion import sampling
from tokenwire_server.conversion.exceptions import FAULTS, translate
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.conversion.validation import json_object
from tokenwire_server.errors import RequestError, Violation, invalid_field


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineRequest:
    """A checked request, ready for the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None
    trace_headers: Mapping[str, str] | None = None
    lora_request: LoRARequest | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    kv_hints: KvHintsEnvelope | None = None


def to_engine(
    message: generation_pb2.GenerationInput,
    limits: RequestLimits,
    adapters: Mapping[str, LoRARequest],
    *,
    request_id: str,
    stream: bool,
    path: str = "input",
) -> EngineRequest:
    """Check a GenerationInput against the engine and convert it.

    Args:
        message: the contract's input, which has passed `validation.check_input`.
        limits: what the engine allows.
        adapters: LoRA adapters by the names that requests use.
        request_id: the request's id, the caller's or the server's.
        stream: whether the caller wants deltas.
        path: path of `message` in the request message, for errors.

    Raises:
        RequestError: the request is refused.

    """
    prompt = _prompt(message, limits, f"{path}.prompt_token_ids")
    lora = _adapter(message, limits, adapters, path)
    try:
        params = sampling.to_vllm(
            message.sampling_params, limits, len(prompt), stream=stream, path=f"{path}.sampling_params"
        )
    except FAULTS as error:
        raise translate(error, path) from error
    _add_transfer_params(message, params, limits, path)
    request = EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, lora_request=lora)
    _add_routing(request, message, limits, path)
    _add_reasoning(request, message, limits, path)
    if message.trace_headers:
        request.trace_headers = dict(message.trace_headers)
    return request


def _prompt(message: generation_pb2.GenerationInput, limits: RequestLimits, field: str) -> list[int]:
    # Before anything is copied: it may be millions.
    if (length := len(message.prompt_token_ids)) >= limits.max_model_len:
        raise invalid_field(
            field,
            f"{length} prompt tokens and one output token must fit the model's context of"
            f" {limits.max_model_len} tokens",
        )
    # A slice is made in C, faster than list(); for long prompts NumPy needs half the time of max().
    prompt: list[int] = message.prompt_token_ids[:]
    highest = int(np.frombuffer(array.array("I", prompt), np.uint32).max())
    # vLLM checks no prompt ids in tokens-only mode: one beyond the vocabulary would end the engine process.
    if highest >= limits.vocab_size:
        raise invalid_field(
            f"{field}[{prompt.index(highest)}]",
            f"must be below the vocabulary's size, {limits.vocab_size}, got {highest}",
        )
    return prompt


def _adapter(
    message: generation_pb2.GenerationInput, limits: RequestLimits, adapters: Mapping[str, LoRARequest], path: str
) -> LoRARequest | None:
    if not message.HasField("model") or message.model in limits.served_model_names:
        return None
    if (adapter := adapters.get(message.model)) is not None:
        return adapter
    known = ", ".join([*limits.served_model_names, *adapters])
    raise RequestError(
        Reason.UNKNOWN_MODEL,
        f"{path}.model: no model or adapter is named {message.model!r}; this server has {known}",
        (Violation(f"{path}.model", f"must be one of {known}"),),
    )


def remote_prefill(message: generation_pb2.GenerationInput) -> dict[str, Any] | None:
    """Return a request's KV transfer parameters where they announce what another engine has computed for it."""
    sampling = message.sampling_params
    try:
        if message.HasField("kv_transfer_params_json"):
            params: Any = json_object(message.kv_transfer_params_json, "")
        elif sampling.HasField("extra_args_json"):
            params = json_object(sampling.extra_args_json, "").get("kv_transfer_params")
        else:
            return None
    except RequestError:
        return None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def _add_transfer_params(
    message: generation_pb2.GenerationInput, params: SamplingParams, limits: RequestLimits, path: str
) -> None:
    if message.HasField("kv_transfer_params_json"):
        _add_extra(params, "kv_transfer_params", message.kv_transfer_params_json, f"{path}.kv_transfer_params_json")
    if message.HasField("ec_transfer_params_json"):
        _add_extra(params, "ec_transfer_params", message.ec_transfer_params_json, f"{path}.ec_transfer_params_json")
    if params.n > 1 and limits.kv_transfer:
        transfer = (params.extra_args or {}).get("kv_transfer_params")
        # The first of the sequences to finish would let go of what the others still need, or none would.
        if isinstance(transfer, dict) and (transfer.get("do_remote_prefill") or transfer.get("do_remote_decode")):
            raise invalid_field(
                f"{path}.sampling_params.n", f"must be 1 where the KV cache goes between engines, got {params.n}"
            )


def _add_extra(params: SamplingParams, key: str, text: str, field: str) -> None:
    if params.extra_args is None:
        params.extra_args = {}
    elif key in params.extra_args:
        raise invalid_field(field, f"is also given in sampling_params.extra_args_json as {key!r}")
    params.extra_args[key] = json_object(text, field)


def _add_routing(
    request: EngineRequest, message: generation_pb2.GenerationInput, limits: RequestLimits, path: str
) -> None:
    if message.HasField("priority"):
        if message.priority and not limits.priority_scheduling:
            raise invalid_field(
                f"{path}.priority", "must be 0 or left out; the server has no --scheduling-policy priority"
            )
        request.priority = message.priority
    if message.HasField("cache_salt"):
        request.cache_salt = message.cache_salt
    if message.HasField("data_parallel_rank"):
        if message.data_parallel_rank >= limits.data_parallel_size:
            raise invalid_field(
                f"{path}.data_parallel_rank",
                f"must be below the engine's data_parallel_size, {limits.data_parallel_size},"
                f" got {message.data_parallel_rank}",
            )
        request.data_parallel_rank = message.data_parallel_rank
    if message.HasField("session_id"):
        request.session_id = message.session_id
    if message.HasField("kv_hints_json"):
        field = f"{path}.kv_hints_json"
        try:
            request.kv_hints = msgspec.convert(json_object(message.kv_hints_json, field), KvHintsEnvelope)
        except msgspec.ValidationError as error:
            raise invalid_field(field, f"is no kv_hints envelope of vLLM: {error}") from None


def _add_reasoning(
    request: EngineRequest, message: generation_pb2.GenerationInput, limits: RequestLimits, path: str
) -> None:
    for field in ("reasoning_ended", "reasoning_parser_kwargs_json"):
        if message.HasField(field) and not limits.has_tokenizer:
            raise RequestError(
                Reason.TOKENIZER_REQUIRED,
                f"{path}.{field}: needs the tokenizer; start the server with --keep-tokenizer",
                (Violation(f"{path}.{field}", "needs a server started with --keep-tokenizer"),),
            )
    if message.HasField("reasoning_ended"):
        request.reasoning_ended = message.reasoning_ended
    if message.HasField("reasoning_parser_kwargs_json"):
        field = f"{path}.reasoning_parser_kwargs_json"
        request.reasoning_parser_kwargs = json_object(message.reasoning_parser_kwargs_json, field)
