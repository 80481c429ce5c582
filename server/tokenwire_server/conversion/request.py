"""Converts the contract's GenerationInput to the arguments of AsyncLLM.add_request."""

import array
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_hints import KvHintsEnvelope

from tokenwire._contract import Reason
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.conversion import sampling
from tokenwire_server.conversion.exceptions import FAULTS, translate
from tokenwire_server.conversion.fields import check_request_id, positive_seconds, quoted
from tokenwire_server.conversion.json_fields import json_object
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.errors import RequestError, Violation, invalid_field, unsupported_field

_CACHE_SALT = re.compile(r"[^@/\\\0]{1,128}")
"""The form of `cache_salt`, as in the contract: that of vLLM's HTTP servers (validate_cache_salt in
vllm/entrypoints/generate/base/protocol.py), since some cache backends build paths from it."""
_MAX_NAME = 1024
"""Maximum length of `model` and `session_id` in characters, as in the contract."""
_MAX_TRACE_HEADERS = 64
"""Maximum number of `trace_headers`, as in the contract."""
_MAX_TRACE_BYTES = 8192
"""Maximum total size of the names and values of `trace_headers`, as in the contract: gRPC's default soft limit for all
metadata of a call, where trace headers usually are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A validated request in vLLM's terms. The message that it was converted from is not read any more."""

    request_id: str
    """The caller's id, or a server-generated one."""
    prompt_token_ids: list[int]
    params: SamplingParams
    return_prompt_token_ids: bool = False
    max_time: float | None = None
    """Seconds after which the request ends with TIME_LIMIT; None means no limit."""
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None
    trace_headers: Mapping[str, str] | None = None
    lora_request: LoRARequest | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    kv_hints: KvHintsEnvelope | None = None
    num_top_tokens: int = 0
    """Number of top tokens reported for each output token; 0 if there are none."""


def number_of_sequences(message: GenerationInput) -> int:
    """Return the n of a request that has not been validated yet."""
    return message.sampling_params.n if message.sampling_params.HasField("n") else 1


def check_input(message: GenerationInput, path: str = "input") -> None:
    """Run the cheap checks that need only the message, before a possibly long prompt is converted.

    Args:
        message: the request.
        path: path of `message` in the request message, for errors.

    Raises:
        RequestError: INVALID_FIELD.

    """
    if message.request_id:
        check_request_id(message.request_id, f"{path}.request_id")
    if not message.prompt_token_ids:
        raise invalid_field(f"{path}.prompt_token_ids", "must contain at least one token id")
    if message.HasField("cache_salt") and not _CACHE_SALT.fullmatch(message.cache_salt):
        raise invalid_field(f"{path}.cache_salt", "must have 1 to 128 characters, none of them @, /, \\ or NUL")
    if message.HasField("model") and not message.model:
        raise invalid_field(f"{path}.model", "must not be empty; leave it unset for the base model")
    for name in ("model", "session_id"):
        if len(getattr(message, name)) > _MAX_NAME:
            raise invalid_field(f"{path}.{name}", f"must have at most {_MAX_NAME} characters")
    if message.HasField("max_time"):
        positive_seconds(message.max_time, f"{path}.max_time")
    if message.trace_headers:
        _check_trace_headers(message.trace_headers, f"{path}.trace_headers")


def _check_trace_headers(headers: Mapping[str, str], field: str) -> None:
    if (count := len(headers)) > _MAX_TRACE_HEADERS:
        raise invalid_field(field, f"must contain at most {_MAX_TRACE_HEADERS} headers, got {count}")
    characters = sum(len(name) + len(value) for name, value in headers.items())
    # A character takes at least one byte, so that much longer headers are refused without encoding them.
    if characters > _MAX_TRACE_BYTES or sum(len(f"{k}{v}".encode()) for k, v in headers.items()) > _MAX_TRACE_BYTES:
        raise invalid_field(field, f"must have at most {_MAX_TRACE_BYTES} bytes together")


def to_engine_request(
    message: GenerationInput,
    limits: RequestLimits,
    adapters: Mapping[str, LoRARequest],
    *,
    request_id: str,
    trace_headers: Mapping[str, str] | None,
    stream: bool,
    path: str = "input",
) -> EngineRequest:
    """Check a GenerationInput against the engine and convert it.

    Args:
        message: the contract's input, which has passed `check_input`.
        limits: the engine's limits and features.
        adapters: LoRA adapters by name.
        request_id: the caller's id or a server-generated one.
        trace_headers: W3C trace context from the call's metadata; the request's own trace headers take precedence.
        stream: whether the caller receives outputs as they are generated, rather than all at once.
        path: path of `message` in the request message, for errors.

    Returns:
        The request in vLLM's terms.

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
    _check_reasoning(message, limits, path)
    headers = message.trace_headers or trace_headers
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        return_prompt_token_ids=message.return_prompt_token_ids,
        max_time=positive_seconds(message.max_time, f"{path}.max_time") if message.HasField("max_time") else None,
        priority=_priority(message, limits, path),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        data_parallel_rank=_data_parallel_rank(message, limits, path),
        session_id=message.session_id if message.HasField("session_id") else None,
        trace_headers=dict(headers) if headers else None,
        lora_request=lora,
        reasoning_ended=message.reasoning_ended if message.HasField("reasoning_ended") else None,
        reasoning_parser_kwargs=_reasoning_parser_kwargs(message, path),
        kv_hints=_kv_hints(message, path),
        num_top_tokens=limits.vocab_size if params.num_logprobs == -1 else params.num_logprobs or 0,
    )


def remote_prefill(message: GenerationInput) -> dict[str, Any] | None:
    """Return a request's KV transfer parameters if another engine has prefilled its prompt; None otherwise."""
    sampling_params = message.sampling_params
    try:
        if message.HasField("kv_transfer_params_json"):
            params: Any = json_object(message.kv_transfer_params_json, "")
        elif sampling_params.HasField("extra_args_json"):
            params = json_object(sampling_params.extra_args_json, "").get("kv_transfer_params")
        else:
            return None
    except RequestError:
        return None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def _prompt(message: GenerationInput, limits: RequestLimits, field: str) -> list[int]:
    # Before anything is copied: there may be millions.
    if (length := len(message.prompt_token_ids)) >= limits.max_model_len:
        raise invalid_field(
            field,
            f"{length} prompt tokens and one output token exceed the model's context length of"
            f" {limits.max_model_len} tokens",
        )
    # Slicing runs in C and is faster than list(); for long prompts NumPy takes half the time of max().
    prompt: list[int] = message.prompt_token_ids[:]
    highest = int(np.frombuffer(array.array("I", prompt), np.uint32).max())
    # vLLM does not check prompt ids in tokens-only mode: an id beyond the vocabulary would crash the engine process.
    if highest >= limits.vocab_size:
        raise invalid_field(
            f"{field}[{prompt.index(highest)}]",
            f"must be below the vocabulary size, {limits.vocab_size}, got {highest}",
        )
    return prompt


def _adapter(
    message: GenerationInput, limits: RequestLimits, adapters: Mapping[str, LoRARequest], path: str
) -> LoRARequest | None:
    if not message.HasField("model") or message.model in limits.served_model_names:
        return None
    if (adapter := adapters.get(message.model)) is not None:
        return adapter
    known = ", ".join([*limits.served_model_names, *adapters])
    raise RequestError(
        Reason.UNKNOWN_MODEL,
        f"{path}.model: no model or adapter is named {quoted(message.model)}; this server serves {known}",
        (Violation(f"{path}.model", f"must be one of {known}"),),
    )


def _add_transfer_params(message: GenerationInput, params: SamplingParams, limits: RequestLimits, path: str) -> None:
    # Before the text is parsed.
    if message.HasField("kv_transfer_params_json") and not limits.kv_transfer:
        raise unsupported_field(
            f"{path}.kv_transfer_params_json", "the engine has no KV connector (--kv-transfer-config)"
        )
    if message.HasField("ec_transfer_params_json") and not limits.ec_transfer:
        raise unsupported_field(
            f"{path}.ec_transfer_params_json", "the engine has no encoder-cache connector (--ec-transfer-config)"
        )
    if message.HasField("kv_transfer_params_json"):
        _add_extra(params, "kv_transfer_params", message.kv_transfer_params_json, f"{path}.kv_transfer_params_json")
    if message.HasField("ec_transfer_params_json"):
        _add_extra(params, "ec_transfer_params", message.ec_transfer_params_json, f"{path}.ec_transfer_params_json")
    if params.n > 1 and limits.kv_transfer:
        transfer = (params.extra_args or {}).get("kv_transfer_params")
        # The first sequence to finish would release KV blocks that the others still need, or none would release them.
        if isinstance(transfer, dict) and (transfer.get("do_remote_prefill") or transfer.get("do_remote_decode")):
            raise invalid_field(
                f"{path}.sampling_params.n", f"must be 1 when the KV cache moves between engines, got {params.n}"
            )


def _add_extra(params: SamplingParams, key: str, text: str, field: str) -> None:
    if params.extra_args is None:
        params.extra_args = {}
    elif key in params.extra_args:
        raise invalid_field(field, f"is also given in sampling_params.extra_args_json as {key!r}")
    params.extra_args[key] = json_object(text, field)


def _priority(message: GenerationInput, limits: RequestLimits, path: str) -> int:
    if message.priority and not limits.priority_scheduling:
        raise invalid_field(f"{path}.priority", "must be 0 or unset; the server has no --scheduling-policy priority")
    return message.priority


def _data_parallel_rank(message: GenerationInput, limits: RequestLimits, path: str) -> int | None:
    if not message.HasField("data_parallel_rank"):
        return None
    if message.data_parallel_rank >= limits.data_parallel_size:
        raise invalid_field(
            f"{path}.data_parallel_rank",
            f"must be below the engine's data_parallel_size, {limits.data_parallel_size},"
            f" got {message.data_parallel_rank}",
        )
    return message.data_parallel_rank


def _kv_hints(message: GenerationInput, path: str) -> KvHintsEnvelope | None:
    if not message.HasField("kv_hints_json"):
        return None
    field = f"{path}.kv_hints_json"
    try:
        return msgspec.convert(json_object(message.kv_hints_json, field), KvHintsEnvelope)
    except msgspec.ValidationError as error:
        raise invalid_field(field, f"is not a valid KvHintsEnvelope: {error}") from None


def _check_reasoning(message: GenerationInput, limits: RequestLimits, path: str) -> None:
    for field in ("reasoning_ended", "reasoning_parser_kwargs_json"):
        if message.HasField(field) and not limits.has_tokenizer:
            raise RequestError(
                Reason.TOKENIZER_REQUIRED,
                f"{path}.{field}: needs the tokenizer; start the server with --keep-tokenizer",
                (Violation(f"{path}.{field}", "needs a server started with --keep-tokenizer"),),
            )


def _reasoning_parser_kwargs(message: GenerationInput, path: str) -> dict[str, Any] | None:
    if not message.HasField("reasoning_parser_kwargs_json"):
        return None
    return json_object(message.reasoning_parser_kwargs_json, f"{path}.reasoning_parser_kwargs_json")
