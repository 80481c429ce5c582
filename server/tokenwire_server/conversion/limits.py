"""What the engine's configuration allows a request to ask for."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.platforms import current_platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Facts of the engine that requests are checked against and completed from."""

    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Valid token ids are below it."""
    max_num_seqs: int
    """Most sequences in one engine step."""
    max_num_queued_reqs: int | None
    """Most unfinished sequences; None means no limit."""
    max_logprobs: int
    """Highest number of further ids reported for each token."""
    data_parallel_size: int
    """Valid data-parallel ranks are below it."""
    priority_scheduling: bool
    """Whether priorities other than 0 mean something."""
    sampling_masks: bool
    """Whether the engine returns sampling masks, for which it needs random sampling and a bound."""
    speculative: bool
    """Whether the engine decodes speculatively, which trace replay excludes."""
    prompt_logprobs: bool
    """Whether the engine can score prompts; one that cannot would die of it."""
    kv_transfer: bool
    """Whether the engine has a KV connector."""
    has_tokenizer: bool
    """Whether the server was started with --keep-tokenizer."""
    served_model_names: tuple[str, ...]
    """Names of the base model, the first one preferred."""
    defaults: dict[str, Any]
    """Sampling parameters that the model's generation_config sets, by vLLM's names, without max_tokens."""
    default_max_tokens: dict[str, Any]
    """What `get_max_tokens` reads of the generation_config: `max_tokens` or nothing."""
    override_max_tokens: int | None
    """Highest max_tokens that the server's configuration allows; None means no such limit."""

    @classmethod
    def from_config(
        cls, config: VllmConfig, *, keep_tokenizer: bool, served_model_names: Sequence[str] = ()
    ) -> "RequestLimits":
        """Read the limits from an engine's configuration, as it is once the engine is ready.

        `served_model_names` are all names of the base model, of which the configuration keeps only the first.
        """
        model = config.model_config
        defaults = dict(model.get_diff_sampling_param())
        max_tokens = defaults.pop("max_tokens", None)
        # The same rule as in vLLM's OpenAIServingChat: only a generation_config named by the operator limits requests.
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
            # Seen in vLLM 0.32: its LoRA logits on the CPU have the shape of one token for each request.
            prompt_logprobs=not (config.lora_config is not None and current_platform.is_cpu()),
            kv_transfer=config.kv_transfer_config is not None,
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
        """Highest n: beyond it a request would never be admitted."""
        return min(self.max_num_seqs, self.max_num_queued_reqs or self.max_num_seqs)

    def max_tokens(self, asked: int | None, prompt_len: int) -> int:
        """Return the most tokens that a request may generate; `asked` None means unset."""
        limit: int = get_max_tokens(
            self.max_model_len, asked, prompt_len, self.default_max_tokens, self.override_max_tokens
        )
        return limit
