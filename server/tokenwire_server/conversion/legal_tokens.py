"""Refuses constraints that together leave no token to sample: the engine would return token 0 again and again."""

from collections.abc import Collection

from vllm.sampling_params import SamplingParams

from tokenwire_server.conversion.fields import conflict
from tokenwire_server.errors import invalid_field

_MAX_MASKED_STOP_IDS = 128
"""MAX_NUM_STOP_TOKEN_IDS of vLLM's V2 model runner, vllm/v1/worker/gpu/sample/logit_bias.py: its capacity for the stop
and EOS ids that `min_tokens` masks. With more its engine process dies."""


def check_legal_tokens(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int], path: str) -> None:
    """Check that the constraints on single tokens leave at least one, at the first token and at every other.

    `logit_bias` is none of them: it is clamped to finite values. Bad words of several tokens forbid their last token only
    after the others, and a grammar what it does not accept, so neither is known here.

    Args:
        params: the request's sampling parameters in vLLM's form.
        vocab_size: size of the vocabulary.
        eos_token_ids: the model's EOS ids, which vLLM masks until `min_tokens` even with `ignore_eos`.
        path: path of the sampling parameters in the request message, for errors.

    Raises:
        RequestError: INVALID_FIELD, with every field that has a part in it; or there are more stop ids to mask than the
            engine has room for.

    """
    if params.trace_decode_token_ids:
        # The engine returns these whatever the constraints are.
        return
    stops = set(params.stop_token_ids)
    masked = stops.union(eos_token_ids) if params.min_tokens else set()
    if len(masked) > _MAX_MASKED_STOP_IDS:
        raise invalid_field(
            f"{path}.stop_token_ids",
            f"must be at most {_MAX_MASKED_STOP_IDS} together with the model's EOS ids while min_tokens is above 0, got"
            f" {len(masked)}",
        )
    if params.structured_outputs is not None:
        # vLLM restores the stop tokens if a grammar leaves nothing else.
        masked = set()
    words = {sequence[0] for sequence in params.bad_words_token_ids or () if len(sequence) == 1}
    allowed = set(params.allowed_token_ids or ()) or range(vocab_size)
    # Most requests end here: there are no more than a few hundred forbidden tokens.
    if len(words) + len(masked) < len(allowed) or not (words | masked).issuperset(allowed):
        return
    parts = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words_token_ids": not words.isdisjoint(allowed),
        "stop_token_ids": not (masked & stops).isdisjoint(allowed),
        "min_tokens": not masked.isdisjoint(allowed),
    }
    names = [name for name, has_part in parts.items() if has_part]
    reason = f"{' and '.join(names)} leave no token to sample"
    if "min_tokens" in names:
        reason += ": min_tokens excludes EOS and stop tokens, also with ignore_eos"
    raise conflict([f"{path}.{name}" for name in names], reason)
