"""From the contract's SamplingParams to vLLM's.

Unset fields keep the model's or vLLM's defaults. Checks for which vLLM's error names the field are left to vLLM; checks
that vLLM reports without the field, or does not make in tokens-only mode, are made here.
"""

from typing import Any

from vllm import envs
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tokenwire.v1 import sampling_params_pb2 as pb
from tokenwire_server.conversion.fields import conflict
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.conversion.sampling_fields import CONVERTERS, RANGES, to_bad_words
from tokenwire_server.errors import invalid_field, unsupported_field

_INT64_MAX = 2**63 - 1
"""Maximum seed of a sequence: vLLM's V2 model runner keeps seeds as int64."""

_EXCLUDED_BY_TRACE = (
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
)


def to_vllm(
    message: pb.SamplingParams, limits: RequestLimits, prompt_len: int, *, stream: bool, path: str
) -> SamplingParams:
    """Return vLLM's SamplingParams for a request.

    Args:
        message: the contract's sampling parameters.
        limits: what the engine allows, and the model's defaults for unset fields.
        prompt_len: number of prompt tokens.
        stream: whether outputs are deltas instead of one final result.
        path: path of `message` in the request message, for errors.

    Raises:
        RequestError: INVALID_FIELD, a value is invalid; TOKENIZER_REQUIRED, a field requires the tokenizer;
            UNSUPPORTED_FIELD, this server does not support a field.
        vllm.exceptions.VLLMClientError: vLLM rejects a value.

    """
    arguments = dict(limits.defaults)
    bad_words: list[list[int]] | None = None
    for descriptor, value in message.ListFields():
        name = descriptor.name
        field = f"{path}.{name}"
        if (bounds := RANGES.get(name)) is not None and not bounds[0] <= value <= bounds[1]:
            raise invalid_field(field, f"must be in [{bounds[0]}, {bounds[1]}], got {value}")
        if name == "bad_words_token_ids":
            bad_words = to_bad_words(value, limits, field)
            continue
        convert = CONVERTERS.get(name)
        if convert is None:
            raise unsupported_field(field, "this server does not support the field")
        target, converted = convert(value, limits, field)
        arguments[target] = converted
    _check_together(arguments, limits, path)
    if bad_words and "trace_decode_token_ids" in arguments:
        raise invalid_field(f"{path}.trace_decode_token_ids", "cannot be combined with bad_words_token_ids")
    arguments["max_tokens"] = limits.max_tokens(arguments.get("max_tokens"), prompt_len)
    if (min_tokens := arguments.get("min_tokens", 0)) > arguments["max_tokens"]:
        raise invalid_field(
            f"{path}.min_tokens", f"must be at most max_tokens, {arguments['max_tokens']}, got {min_tokens}"
        )
    params = SamplingParams(
        **arguments,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        detokenize=False,
        flat_logprobs=True,
        # Built for this request only, so vLLM does not have to copy it.
        skip_clone=True,
    )
    if bad_words:
        # vLLM derives this from the strings in `bad_words`, which requires a tokenizer.
        params._bad_words_token_ids = bad_words  # noqa: SLF001  # vLLM has no other way to pass token ids
    return params


def _check_together(arguments: dict[str, Any], limits: RequestLimits, path: str) -> None:
    n = arguments.get("n", 1)
    _check_n(n, arguments.get("seed", -1), limits, path)
    # vLLM checks this only in add_request, after the size of the response has been computed from it.
    for name in ("logprobs", "prompt_logprobs"):
        k = arguments.get(name, 0)
        if (limits.vocab_size if k == -1 else k) > limits.max_logprobs:
            raise invalid_field(f"{path}.{name}", f"must be at most the engine's max_logprobs, {limits.max_logprobs}")
    # vLLM raises other temperatures below 0.01 to 0.01 before it compares them with its own threshold, 1e-5.
    greedy = arguments.get("temperature", 1.0) == 0
    if n > 1 and greedy:
        raise invalid_field(f"{path}.n", f"must be 1 with greedy sampling (temperature 0), got {n}")
    _check_prompt_logprobs(arguments, limits, path)
    # For the checks below vLLM raises a ValueError that does not name the field.
    if limits.sampling_masks:
        if greedy:
            raise invalid_field(f"{path}.temperature", "must be above 0: the engine returns sampling masks")
        if arguments.get("top_k", 0) <= 0:
            raise invalid_field(f"{path}.top_k", "must be above 0: the engine returns sampling masks")
    if "trace_decode_token_ids" in arguments:
        others = [name for name in _EXCLUDED_BY_TRACE if name in arguments]
        others += ["n"] if n > 1 else []
        others += ["speculative decoding"] if limits.speculative else []
        if others:
            raise invalid_field(f"{path}.trace_decode_token_ids", f"cannot be combined with {', '.join(others)}")


def _check_n(n: int, seed: int, limits: RequestLimits, path: str) -> None:
    if n > limits.max_n:
        name = "max_num_seqs" if limits.max_n == limits.max_num_seqs else "max_num_queued_reqs"
        raise invalid_field(f"{path}.n", f"must be at most the engine's {name}, {limits.max_n}, got {n}")
    if n > envs.VLLM_MAX_N_SEQUENCES:
        raise invalid_field(f"{path}.n", f"must be at most {envs.VLLM_MAX_N_SEQUENCES}, got {n}")
    # vLLM gives sequence i the seed `seed + i`, and takes -1 as no seed.
    if seed != -1 and seed <= -1 < seed + n:
        raise invalid_field(
            f"{path}.seed", f"must not be in [{-n}, -2] with n {n}: sequence {-1 - seed} would not be seeded"
        )
    if seed + n - 1 > _INT64_MAX:
        raise invalid_field(
            f"{path}.seed", f"must be at most 2^63 - n, since sequence i has the seed seed + i, got {seed}"
        )


def _check_prompt_logprobs(arguments: dict[str, Any], limits: RequestLimits, path: str) -> None:
    if "prompt_logprobs" in arguments and not limits.prompt_logprobs:
        raise unsupported_field(
            f"{path}.prompt_logprobs", "vLLM's CPU engine does not support them while LoRA is enabled"
        )
    if arguments.get("skip_reading_prefix_cache") is False:
        for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
            if name in arguments:
                # For a prefix that it finds in the cache, vLLM has no log probabilities and returns uninitialized memory.
                raise conflict(
                    [f"{path}.{name}", f"{path}.skip_reading_prefix_cache"],
                    f"{name} cannot be combined with skip_reading_prefix_cache false: the prompt must be computed",
                )
