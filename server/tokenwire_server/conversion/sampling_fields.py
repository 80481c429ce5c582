"""Converters for the fields of the contract's SamplingParams.

A converter takes the field's value, the engine's limits and the field's path in the request message, and returns the
name and value of vLLM's argument. It raises RequestError for an invalid value.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, RepetitionDetectionParams, StructuredOutputsParams

from tokenwire._contract import Reason
from tokenwire.v1 import sampling_params_pb2 as pb
from tokenwire_server.conversion.json_fields import check_json_object, json_object
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.errors import RequestError, Violation, invalid_field

_MAX_BAD_WORDS = 128
"""Default of VLLM_MAX_NUM_BAD_WORDS, the capacity per request of vLLM's GPU sampler."""
_MAX_BAD_WORD_IDS = 1024
"""Default of VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, likewise."""
_MAX_ALLOWED_IDS = 1024
"""MAX_NUM_ALLOWED_TOKEN_IDS of vLLM's V2 model runner, vllm/v1/worker/gpu/sample/logit_bias.py: with more ids its
engine process dies. The limit is the same on every engine, so that a request does not depend on the device."""
_MAX_BIASES = 1024
"""MAX_NUM_LOGIT_BIAS_TOKENS of the same file, likewise."""
_MAX_STOP_IDS = 1024
"""vLLM has no limit unless min_tokens is set (`legal_tokens`); this one bounds the time to check and compare them."""
_INT32_MAX = 2**31 - 1

RANGES: dict[str, tuple[float, float]] = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, _INT32_MAX),
    "logprobs": (-1, _INT32_MAX),
    "prompt_logprobs": (-1, _INT32_MAX),
    "thinking_token_budget": (-1, _INT32_MAX),
    "n": (1, _INT32_MAX),
    "max_tokens": (1, 2**32 - 1),
    "stream_interval": (1, _INT32_MAX),
}
"""Minimum and maximum values, as in vLLM's SamplingParams._verify_args, whose errors do not always name the field.

Where vLLM has no maximum, it is that of int32 or of the field's type.
"""


def _unchanged(value: Any, _limits: RequestLimits, field: str) -> tuple[str, Any]:
    return field.rpartition(".")[2], value


def _finite_positive(value: float, _limits: RequestLimits, field: str) -> tuple[str, float]:
    if not 0.0 < value < float("inf"):
        raise invalid_field(field, f"must be above 0 and finite, got {value}")
    return "repetition_penalty", value


def _check_count(values: Sized, most: int, field: str) -> None:
    """Refuse a field with too many values before they are copied: a message has room for millions."""
    if len(values) > most:
        raise invalid_field(field, f"must contain at most {most} ids, got {len(values)}")


def _ids(values: Iterable[int], limits: RequestLimits, field: str) -> list[int]:
    ids = list(values)
    if ids and (highest := max(ids)) >= limits.vocab_size:
        raise invalid_field(
            f"{field}[{ids.index(highest)}]", f"must be below the vocabulary size, {limits.vocab_size}, got {highest}"
        )
    return ids


def _stop_ids(value: Sequence[int], limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    _check_count(value, _MAX_STOP_IDS, field)
    return "stop_token_ids", _ids(value, limits, field)


def _wrapped_ids(value: pb.TokenIds, limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    ids = _ids(value.token_ids, limits, f"{field}.token_ids")
    if not ids:
        raise invalid_field(f"{field}.token_ids", "must contain at least one id; leave the field unset for none")
    return field.rpartition(".")[2], ids


def _allowed_ids(value: pb.TokenIds, limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    _check_count(value.token_ids, _MAX_ALLOWED_IDS, f"{field}.token_ids")
    return _wrapped_ids(value, limits, field)


def _trace_ids(value: pb.TokenIds, limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    _check_count(value.token_ids, limits.max_model_len, f"{field}.token_ids")
    return _wrapped_ids(value, limits, field)


def _logprob_ids(value: pb.TokenIds, limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    _check_count(value.token_ids, MAX_LOGPROB_TOKEN_IDS, f"{field}.token_ids")
    name, ids = _wrapped_ids(value, limits, field)
    if len(set(ids)) < len(ids):
        # vLLM stores the log probabilities of a position in a dict by id.
        raise invalid_field(f"{field}.token_ids", "must contain each id once")
    return name, ids


def _logit_bias(value: Mapping[int, float], limits: RequestLimits, field: str) -> tuple[str, dict[int, float]]:
    _check_count(value, _MAX_BIASES, field)
    biases = dict(value)
    if biases and (highest := max(biases)) >= limits.vocab_size:
        raise invalid_field(
            f"{field}[{highest}]", f"must be below the vocabulary size, {limits.vocab_size}, got {highest}"
        )
    if any(bias != bias for bias in biases.values()):  # noqa: PLR0124  # only NaN differs from itself
        raise invalid_field(field, "must not contain NaN")
    # Clamped as in vLLM's SamplingParams.from_optional.
    return "logit_bias", {token: min(100.0, max(-100.0, bias)) for token, bias in biases.items()}


def _rows(value: pb.TokenIdRows, limits: RequestLimits, field: str) -> tuple[str, Any]:
    # As in vLLM, whose own check comes after the array has been allocated.
    if (count := len(value.rows)) >= limits.max_model_len:
        raise invalid_field(f"{field}.rows", f"must contain at most {limits.max_model_len - 1} rows, got {count}")
    for i, ids in enumerate(value.rows):
        _check_count(ids.token_ids, limits.max_logprobs, f"{field}.rows[{i}].token_ids")
    rows = [_ids(row.token_ids, limits, f"{field}.rows[{i}].token_ids") for i, row in enumerate(value.rows)]
    width = max(map(len, rows), default=0)
    if not width:
        raise invalid_field(field, "must contain at least one id")
    # vLLM's form: one row per scored position, padded with -1.
    array = np.full((len(rows), width), -1, dtype=np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return "prompt_logprob_token_ids", array


def to_bad_words(value: Sequence[pb.TokenIds], limits: RequestLimits, field: str) -> list[list[int]]:
    """Return the token id sequences of bad_words_token_ids.

    Args:
        value: the sequences.
        limits: what the engine allows.
        field: path of the field in the request message, for errors.

    Raises:
        RequestError: INVALID_FIELD, a sequence is empty or contains an invalid id, or there are too many.

    """
    if len(value) > _MAX_BAD_WORDS:
        raise invalid_field(field, f"must contain at most {_MAX_BAD_WORDS} sequences, got {len(value)}")
    if (total := sum(len(sequence.token_ids) for sequence in value)) > _MAX_BAD_WORD_IDS:
        raise invalid_field(field, f"must contain at most {_MAX_BAD_WORD_IDS} ids in total, got {total}")
    sequences = [_ids(sequence.token_ids, limits, f"{field}[{i}].token_ids") for i, sequence in enumerate(value)]
    for i, sequence in enumerate(sequences):
        if not sequence:
            raise invalid_field(f"{field}[{i}].token_ids", "must contain at least one id")
    return sequences


def _structured_outputs(
    value: pb.StructuredOutputsParams, limits: RequestLimits, field: str
) -> tuple[str, StructuredOutputsParams]:
    kind = value.WhichOneof("constraint")
    if kind is None:
        raise invalid_field(f"{field}.constraint", "must be set: one of json, regex, choice, grammar, ...")
    if not limits.has_tokenizer:
        raise RequestError(
            Reason.TOKENIZER_REQUIRED,
            f"{field}: structured outputs need the tokenizer; start the server with --keep-tokenizer",
            (Violation(field, "needs a server started with --keep-tokenizer"),),
        )
    constraint: Any = getattr(value, kind)
    if kind == "choice":
        constraint = list(value.choice.choices)
        if not constraint:
            raise invalid_field(f"{field}.choice.choices", "must contain at least one choice")
    elif kind == "json_object":
        constraint = True
    elif not constraint:
        raise invalid_field(f"{field}.{kind}", "must not be empty")
    elif kind in {"json", "structural_tag"}:
        check_json_object(constraint, f"{field}.{kind}")
    options: dict[str, Any] = {kind: constraint}
    for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if value.HasField(option):
            options[option] = getattr(value, option)
    return "structured_outputs", StructuredOutputsParams(**options)


def _repetition_detection(
    value: pb.RepetitionDetectionParams, _limits: RequestLimits, field: str
) -> tuple[str, RepetitionDetectionParams]:
    if value.min_pattern_size > value.max_pattern_size:
        raise invalid_field(f"{field}.min_pattern_size", "must be at most max_pattern_size")
    if value.max_pattern_size and value.min_count < 2:  # noqa: PLR2004  # a repetition has at least two occurrences
        raise invalid_field(f"{field}.min_count", "must be at least 2")
    params = RepetitionDetectionParams(
        max_pattern_size=value.max_pattern_size, min_pattern_size=value.min_pattern_size, min_count=value.min_count
    )
    return "repetition_detection", params


def _extra_args(value: str, _limits: RequestLimits, field: str) -> tuple[str, dict[str, Any]]:
    return "extra_args", json_object(value, field)


CONVERTERS: dict[str, Callable[[Any, RequestLimits, str], tuple[str, Any]]] = {
    "n": _unchanged,
    "temperature": _unchanged,
    "top_p": _unchanged,
    "top_k": _unchanged,
    "min_p": _unchanged,
    "presence_penalty": _unchanged,
    "frequency_penalty": _unchanged,
    "repetition_penalty": _finite_positive,
    "seed": _unchanged,
    "max_tokens": _unchanged,
    "min_tokens": _unchanged,
    "stop_token_ids": _stop_ids,
    "ignore_eos": _unchanged,
    "logit_bias": _logit_bias,
    "logprobs": _unchanged,
    "prompt_logprobs": _unchanged,
    "logprob_token_ids": _logprob_ids,
    "prompt_logprob_token_ids": _rows,
    "prompt_logprob_start": _unchanged,
    "allowed_token_ids": _allowed_ids,
    "structured_outputs": _structured_outputs,
    "stream_interval": _unchanged,
    "skip_reading_prefix_cache": _unchanged,
    "thinking_token_budget": _unchanged,
    "repetition_detection": _repetition_detection,
    "watermarking": _unchanged,
    "extra_args_json": _extra_args,
    "routed_experts_prompt_start": _unchanged,
    "trace_decode_token_ids": _trace_ids,
}
"""Converter of every field by its name; bad_words_token_ids, which is not an argument of vLLM's, is not among them."""
