"""From the contract's SamplingParams to vLLM's, field by field.

Only the fields that are set are looked at. What vLLM checks with a message that names the field is left to vLLM; what
it checks without naming the field, or not at all in tokens-only mode, is checked here.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from vllm import envs
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

from tokenwire._contract import Reason
from tokenwire.v1 import sampling_params_pb2 as pb
from tokenwire_server.conversion.json_fields import check_json_object, json_object
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.errors import RequestError, Violation, invalid_field, unsupported_field

# vLLM's V1 sampler on the device allows no more of them in one request.
_MAX_BAD_WORDS = 128
_MAX_BAD_WORD_IDS = 1024
_INT32_MAX = 2**31 - 1

# vLLM samples greedily below this temperature.
_GREEDY = 1e-5

_NOT_WITH_TRACE = (
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
)

# Highest and lowest values of fields that vLLM checks without naming them.
_RANGES: dict[str, tuple[float, float]] = {
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


def to_vllm(
    message: pb.SamplingParams, limits: RequestLimits, prompt_len: int, *, stream: bool, path: str
) -> SamplingParams:
    """Return vLLM's SamplingParams for a request.

    Args:
        message: the contract's sampling parameters.
        limits: what the engine allows, and the model's defaults for what is not set.
        prompt_len: length of the prompt, in tokens.
        stream: whether the caller wants deltas, rather than one result.
        path: path of `message` in the request message, for errors.

    Raises:
        RequestError: a field has a wrong value (INVALID_FIELD), needs a tokenizer (TOKENIZER_REQUIRED) or is not
            honoured by this server (UNSUPPORTED_FIELD).
        vllm.exceptions.VLLMClientError: vLLM refuses a value.

    """
    arguments = dict(limits.defaults)
    bad_words: list[list[int]] | None = None
    for descriptor, value in message.ListFields():
        name = descriptor.name
        field = f"{path}.{name}"
        if (bounds := _RANGES.get(name)) is not None and not bounds[0] <= value <= bounds[1]:
            raise invalid_field(field, f"must be in [{bounds[0]}, {bounds[1]}], got {value}")
        if name == "bad_words_token_ids":
            bad_words = _bad_words(value, limits, field)
            continue
        convert = _CONVERT.get(name)
        if convert is None:
            raise unsupported_field(field, "this server does not know the field")
        target, converted = convert(value, limits, field)
        arguments[target] = converted
    _check_together(arguments, limits, path)
    if bad_words and "trace_decode_token_ids" in arguments:
        raise invalid_field(f"{path}.trace_decode_token_ids", "excludes bad_words_token_ids")
    arguments["max_tokens"] = limits.max_tokens(arguments.get("max_tokens"), prompt_len)
    if (min_tokens := arguments.get("min_tokens", 0)) > arguments["max_tokens"]:
        raise invalid_field(
            f"{path}.min_tokens", f"must be at most max_tokens, here {arguments['max_tokens']}, got {min_tokens}"
        )
    params = SamplingParams(
        **arguments,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        detokenize=False,
        flat_logprobs=True,
        # Built for this request alone, so vLLM need not copy it.
        skip_clone=True,
    )
    if bad_words:
        # vLLM fills this from the strings in `bad_words`, for which it needs a tokenizer.
        params._bad_words_token_ids = bad_words  # noqa: SLF001  # the only way in for token ids
    return params


def _check_together(arguments: dict[str, Any], limits: RequestLimits, path: str) -> None:
    n = arguments.get("n", 1)
    if n > limits.max_n:
        name = "max_num_seqs" if limits.max_n == limits.max_num_seqs else "max_num_queued_reqs"
        raise invalid_field(f"{path}.n", f"must be at most the engine's {name}, {limits.max_n}, got {n}")
    if n > envs.VLLM_MAX_N_SEQUENCES:
        raise invalid_field(f"{path}.n", f"must be at most {envs.VLLM_MAX_N_SEQUENCES}, got {n}")
    # vLLM checks it too, but only once the request is on its way, when its size has been taken seriously.
    for name in ("logprobs", "prompt_logprobs"):
        k = arguments.get(name, 0)
        if (limits.vocab_size if k == -1 else k) > limits.max_logprobs:
            raise invalid_field(f"{path}.{name}", f"must be at most the engine's max_logprobs, {limits.max_logprobs}")
    greedy = arguments.get("temperature", 1.0) < _GREEDY
    if n > 1 and greedy:
        raise invalid_field(f"{path}.n", f"must be 1 with greedy sampling (temperature 0), got {n}")
    if "prompt_logprobs" in arguments and not limits.prompt_logprobs:
        raise unsupported_field(f"{path}.prompt_logprobs", "vLLM's CPU engine cannot give them while LoRA is on")
    # vLLM checks the rest with a mere ValueError.
    if limits.sampling_masks:
        if greedy:
            raise invalid_field(f"{path}.temperature", "must be above 0: the engine returns sampling masks")
        if arguments.get("top_k", 0) <= 0:
            raise invalid_field(f"{path}.top_k", "must be above 0: the engine returns sampling masks")
    if "trace_decode_token_ids" in arguments:
        others = [name for name in _NOT_WITH_TRACE if name in arguments]
        others += ["n"] if n > 1 else []
        others += ["speculative decoding"] if limits.speculative else []
        if others:
            raise invalid_field(f"{path}.trace_decode_token_ids", f"excludes {', '.join(others)}")


def _same(value: Any, _limits: RequestLimits, field: str) -> tuple[str, Any]:
    return field.rpartition(".")[2], value


def _finite_positive(value: float, _limits: RequestLimits, field: str) -> tuple[str, float]:
    if not 0.0 < value < float("inf"):
        raise invalid_field(field, f"must be above 0 and finite, got {value}")
    return "repetition_penalty", value


def _ids(values: Iterable[int], limits: RequestLimits, field: str) -> list[int]:
    ids = list(values)
    if ids and (highest := max(ids)) >= limits.vocab_size:
        raise invalid_field(
            f"{field}[{ids.index(highest)}]", f"must be below the vocabulary's size, {limits.vocab_size}, got {highest}"
        )
    return ids


def _repeated_ids(value: Iterable[int], limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    return field.rpartition(".")[2], _ids(value, limits, field)


def _wrapped_ids(value: pb.TokenIds, limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    ids = _ids(value.token_ids, limits, f"{field}.token_ids")
    if not ids:
        raise invalid_field(f"{field}.token_ids", "must hold at least one id; leave the field out for none")
    return field.rpartition(".")[2], ids


def _distinct_ids(value: pb.TokenIds, limits: RequestLimits, field: str) -> tuple[str, list[int]]:
    name, ids = _wrapped_ids(value, limits, field)
    if len(set(ids)) < len(ids):
        # vLLM keys log probabilities by id.
        raise invalid_field(f"{field}.token_ids", "must hold each id once")
    return name, ids


def _logit_bias(value: dict[int, float], limits: RequestLimits, field: str) -> tuple[str, dict[int, float]]:
    biases = dict(value)
    if biases and (highest := max(biases)) >= limits.vocab_size:
        raise invalid_field(
            f"{field}[{highest}]", f"must be below the vocabulary's size, {limits.vocab_size}, got {highest}"
        )
    if any(bias != bias for bias in biases.values()):  # noqa: PLR0124  # NaN alone differs from itself
        raise invalid_field(field, "must not hold NaN")
    # The same limits as in vLLM's SamplingParams.from_optional.
    return "logit_bias", {token: min(100.0, max(-100.0, bias)) for token, bias in biases.items()}


def _rows(value: pb.TokenIdRows, limits: RequestLimits, field: str) -> tuple[str, Any]:
    rows = [_ids(row.token_ids, limits, f"{field}.rows[{i}].token_ids") for i, row in enumerate(value.rows)]
    width = max(map(len, rows), default=0)
    if not width:
        raise invalid_field(field, "must hold at least one id")
    array = np.full((len(rows), width), -1, dtype=np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return "prompt_logprob_token_ids", array


def _bad_words(value: Iterable[pb.TokenIds], limits: RequestLimits, field: str) -> list[list[int]]:
    sequences = [_ids(sequence.token_ids, limits, f"{field}[{i}].token_ids") for i, sequence in enumerate(value)]
    if len(sequences) > _MAX_BAD_WORDS:
        raise invalid_field(field, f"must hold at most {_MAX_BAD_WORDS} sequences, got {len(sequences)}")
    if (total := sum(map(len, sequences))) > _MAX_BAD_WORD_IDS:
        raise invalid_field(field, f"must hold at most {_MAX_BAD_WORD_IDS} ids in all, got {total}")
    for i, sequence in enumerate(sequences):
        if not sequence:
            raise invalid_field(f"{field}[{i}].token_ids", "must hold at least one id")
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
            raise invalid_field(f"{field}.choice.choices", "must hold at least one text")
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
    if value.max_pattern_size and value.min_count < 2:  # noqa: PLR2004  # fewer than two is no repetition
        raise invalid_field(f"{field}.min_count", "must be at least 2")
    params = RepetitionDetectionParams(
        max_pattern_size=value.max_pattern_size, min_pattern_size=value.min_pattern_size, min_count=value.min_count
    )
    return "repetition_detection", params


def _extra_args(value: str, _limits: RequestLimits, field: str) -> tuple[str, dict[str, Any]]:
    return "extra_args", json_object(value, field)


_CONVERT: dict[str, Callable[[Any, RequestLimits, str], tuple[str, Any]]] = {
    "n": _same,
    "temperature": _same,
    "top_p": _same,
    "top_k": _same,
    "min_p": _same,
    "presence_penalty": _same,
    "frequency_penalty": _same,
    "repetition_penalty": _finite_positive,
    "seed": _same,
    "max_tokens": _same,
    "min_tokens": _same,
    "stop_token_ids": _repeated_ids,
    "ignore_eos": _same,
    "logit_bias": _logit_bias,
    "logprobs": _same,
    "prompt_logprobs": _same,
    "logprob_token_ids": _distinct_ids,
    "prompt_logprob_token_ids": _rows,
    "prompt_logprob_start": _same,
    "allowed_token_ids": _wrapped_ids,
    "structured_outputs": _structured_outputs,
    "stream_interval": _same,
    "skip_reading_prefix_cache": _same,
    "thinking_token_budget": _same,
    "repetition_detection": _repetition_detection,
    "watermarking": _same,
    "extra_args_json": _extra_args,
    "routed_experts_prompt_start": _same,
    "trace_decode_token_ids": _wrapped_ids,
}
