"""Limits and defaults of requests, from the engine's configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.platforms import current_platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What requests are checked against, and the defaults of their unset fields."""

    max_model_len: int
    """Maximum number of prompt and output tokens of a sequence."""
    vocab_size: int
    """Size of the vocabulary; valid token ids are smaller."""
    max_num_seqs: int
    """Maximum number of sequences in an engine step."""
    max_num_queued_reqs: int | None
    """Maximum number of unfinished sequences; None means no limit."""
    max_logprobs: int
    """Maximum number of top tokens per token; the vocabulary size if the engine sets no limit."""
    data_parallel_size: int
    """Number of data-parallel ranks; valid ranks are smaller."""
    priority_scheduling: bool
    """Whether the scheduler honours priorities other than 0."""
    sampling_masks: bool
    """Whether the engine returns sampling masks, which require random sampling and a top_k."""
    speculative: bool
    """Whether the engine uses speculative decoding, which excludes trace replay."""
    prompt_logprobs: bool
    """Whether prompt log probabilities are supported; an engine without support would crash."""
    kv_transfer: bool
    """Whether the engine has a KV connector."""
    ec_transfer: bool
    """Whether the engine has an encoder-cache connector."""
    stream_interval: int
    """Minimum number of new tokens in an output of a stream, except for the first and the last."""
    has_tokenizer: bool
    """Whether the server was started with --keep-tokenizer."""
    served_model_names: tuple[str, ...]
    """Names of the base model, the preferred one first."""
    defaults: dict[str, Any]
    """Sampling parameters from the model's generation_config, by vLLM's names, without max_tokens."""
    default_max_tokens: dict[str, Any]
    """`max_tokens` from the generation_config, if set: the form that vLLM's `get_max_tokens` takes."""
    override_max_tokens: int | None
    """Maximum max_tokens that the operator has configured; None means no limit."""

    @classmethod
    def from_config(
        cls, config: VllmConfig, *, keep_tokenizer: bool, served_model_names: Sequence[str] = ()
    ) -> "RequestLimits":
        """Read the limits from an engine's configuration.

        Args:
            config: the configuration, after the engine is ready.
            keep_tokenizer: whether the server was started with --keep-tokenizer.
            served_model_names: all names of the base model; the configuration contains only the first.

        Returns:
            The limits.

        """
        model = config.model_config
        defaults = dict(model.get_diff_sampling_param())
        max_tokens = defaults.pop("max_tokens", None)
        # As in vLLM's OpenAIServingChat: a generation_config limits max_tokens only if the operator has named it.
        if model.generation_config in ("auto", "vllm"):
            override = model.override_generation_config.get("max_new_tokens")
        else:
            override = max_tokens
        names = model.served_model_name
        return cls(
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_queued_reqs=config.scheduler_config.max_num_queued_reqs,
            max_logprobs=model.get_vocab_size() if model.max_logprobs == -1 else model.max_logprobs,
            data_parallel_size=config.parallel_config.data_parallel_size,
            priority_scheduling=config.scheduler_config.policy == "priority",
            sampling_masks=bool(model.return_sampling_mask),
            speculative=config.speculative_config is not None,
            # vLLM 0.32 on the CPU: its LoRA logits have the shape of one token per request, which crashes the engine.
            prompt_logprobs=not (config.lora_config is not None and current_platform.is_cpu()),
            kv_transfer=config.kv_transfer_config is not None,
            ec_transfer=config.ec_transfer_config is not None,
            stream_interval=config.scheduler_config.stream_interval,
            has_tokenizer=keep_tokenizer,
            served_model_names=tuple(
                dict.fromkeys([*served_model_names, *([names] if isinstance(names, str) else names or ()), model.model])
            ),
            defaults=defaults,
            default_max_tokens={} if max_tokens is None else {"max_tokens": max_tokens},
            override_max_tokens=override,
        )

    @property
    def max_n(self) -> int:
        """Maximum n; a request with more sequences would never be admitted."""
        return min(self.max_num_seqs, self.max_num_queued_reqs or self.max_num_seqs)

    def max_tokens(self, requested: int | None, prompt_len: int) -> int:
        """Return the maximum number of output tokens of a request; `requested` None means that max_tokens is unset."""
        limit: int = get_max_tokens(
            self.max_model_len, requested, prompt_len, self.default_max_tokens, self.override_max_tokens
        )
        return limit
