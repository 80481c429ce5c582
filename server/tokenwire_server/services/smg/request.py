"""Converts VllmEngine's GenerateRequest to a GenerationInput.

Most of VllmEngine's scalar fields have no presence. Zero is used as is if it is a valid value; otherwise it means "not
set", and top_p, repetition_penalty and n default to 1. An absent temperature is 1 too: the server does not apply the
model's generation_config, which GetModelInfo returns and the gateway applies.
"""

from typing import Any

from tokenwire.v1 import generation_pb2, sampling_params_pb2
from tokenwire_server.errors import invalid_field, unsupported_field

_SAME = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos")
"""Fields where zero has the same meaning in the contract."""
_ONE_IF_ZERO = ("top_p", "repetition_penalty", "n")
"""Fields where zero is not a valid value and means "not set"."""
_SAME_IF_SET = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
"""Fields with presence."""
_TEXTS = ("regex", "grammar", "structural_tag")
"""Constraints that are a single string, with the same name in the contract."""
_FOR_TEXT = (
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Fields about detokenized text, which the gateway produces; `stop_strings` uses the first three."""

_KNOWN = frozenset(
    {"request_id", "tokenized", "sampling_params", "stream", "kv_transfer_params_json", "data_parallel_rank"}
)
_KNOWN_SAMPLING = frozenset(
    {
        *_SAME,
        *_ONE_IF_ZERO,
        *_SAME_IF_SET,
        *_TEXTS,
        *_FOR_TEXT,
        *("temperature", "stop_token_ids", "logit_bias", "json_schema", "choice", "json_object"),
        "grammar_from_first_token",
    }
)
_INSTEAD = {
    "text": "this server accepts token ids only, in tokenized",
    "mm_inputs": "this server accepts token ids only",
    "extra_mm_inputs": "this server accepts token ids only",
    "media_refs": "this server accepts token ids only",
    "kv_transfer_params": "is deprecated; use kv_transfer_params_json",
    "truncate_prompt_tokens": "truncate the prompt's token ids before sending the request",
}


def fill(message: generation_pb2.GenerationInput, request: Any) -> None:
    """Convert a request, except its stop strings, into `message`.

    KV transfer parameters are converted first, so that a remote prefill can be released if another field is refused.

    Raises:
        RequestError: a field is not supported or has an invalid value.

    """
    message.request_id = request.request_id
    if request.HasField("kv_transfer_params_json"):
        message.kv_transfer_params_json = request.kv_transfer_params_json
    if request.HasField("data_parallel_rank"):
        if request.data_parallel_rank < 0:
            raise invalid_field("data_parallel_rank", f"must be 0 or more, got {request.data_parallel_rank}")
        message.data_parallel_rank = request.data_parallel_rank
    _check_known(request, _KNOWN, "")
    if not request.HasField("tokenized"):
        raise invalid_field("tokenized", "must be set")
    message.prompt_token_ids.extend(request.tokenized.input_ids)
    _fill_sampling(message.sampling_params, request.sampling_params)
    if request.sampling_params.grammar_from_first_token:
        message.reasoning_ended = True


def _check_known(message: Any, known: frozenset[str], path: str) -> None:
    """Refuse fields that would otherwise be ignored, including those of later versions of VllmEngine."""
    for descriptor, _ in message.ListFields():
        if descriptor.name not in known:
            raise unsupported_field(
                f"{path}{descriptor.name}", _INSTEAD.get(descriptor.name, "this server does not support the field")
            )


def _fill_sampling(message: sampling_params_pb2.SamplingParams, params: Any) -> None:
    _check_known(params, _KNOWN_SAMPLING, "sampling_params.")
    message.temperature = params.temperature if params.HasField("temperature") else 1.0
    for name in _SAME:
        _set(message, name, getattr(params, name))
    for name in _ONE_IF_ZERO:
        _set(message, name, getattr(params, name) or 1)
    for name in _SAME_IF_SET:
        if params.HasField(name):
            _set(message, name, getattr(params, name))
    message.stop_token_ids.extend(params.stop_token_ids)
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise invalid_field(f"sampling_params.logit_bias[{token_id}]", "must be a token id, 0 or more")
        message.logit_bias[token_id] = bias
    _fill_constraint(message, params)


def _set(message: sampling_params_pb2.SamplingParams, name: str, value: float) -> None:
    try:
        setattr(message, name, value)
    except ValueError:  # VllmEngine's field has a wider type
        raise invalid_field(f"sampling_params.{name}", f"is out of range, got {value}") from None


def _fill_constraint(message: sampling_params_pb2.SamplingParams, params: Any) -> None:
    kind = params.WhichOneof("constraint")
    if kind == "json_schema":
        message.structured_outputs.json = params.json_schema
    elif kind in _TEXTS:
        setattr(message.structured_outputs, kind, getattr(params, kind))
    elif kind == "choice":
        message.structured_outputs.choice.choices.extend(params.choice.choices)
        message.structured_outputs.choice.SetInParent()
    elif kind == "json_object" and params.json_object:
        message.structured_outputs.json_object.SetInParent()
