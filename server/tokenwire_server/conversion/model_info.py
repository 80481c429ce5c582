"""Model and engine properties that other protocols report but the contract's EngineInfo does not contain."""

import dataclasses

from vllm.config import VllmConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Properties of the model and its engine, as `services/smg` reports them."""

    tokenizer: str
    """Local folder or Hugging Face Hub name of the tokenizer."""
    tokenizer_revision: str | None
    """Revision of the tokenizer on the Hub; None means the default branch."""
    model_type: str
    """`model_type` of config.json, "llama" for example."""
    architectures: tuple[str, ...]
    """`architectures` of config.json, "LlamaForCausalLM" for example."""
    bos_token_id: int | None
    """`bos_token_id` of config.json; None if it has none."""
    pad_token_id: int | None
    """`pad_token_id` of config.json; None if it has none."""
    kv_engine_id: str | None
    """The engine's id for its KV connector; None without a connector."""
    kv_cache_dtype: str
    """Data type of the KV cache; "auto" means the model's."""
    attention_backend: str | None
    """Name of the configured attention backend; None means that vLLM selects one."""
    reasoning_parser: str | None
    """Name of the reasoning parser; None without one."""
    grammar_after_reasoning: bool
    """Whether structured outputs apply only after the reasoning has ended."""

    @classmethod
    def from_config(cls, config: VllmConfig) -> "ModelInfo":
        """Read the properties from the engine's configuration."""
        model, structured = config.model_config, config.structured_outputs_config
        transfer, backend = config.kv_transfer_config, config.attention_config.backend
        parser = structured.reasoning_parser or None
        return cls(
            tokenizer=str(model.tokenizer),
            tokenizer_revision=model.tokenizer_revision,
            model_type=model.hf_config.model_type,
            architectures=tuple(model.architectures),
            bos_token_id=getattr(model.hf_text_config, "bos_token_id", None),
            pad_token_id=getattr(model.hf_text_config, "pad_token_id", None),
            kv_engine_id=None if transfer is None else transfer.engine_id,
            kv_cache_dtype=config.cache_config.cache_dtype,
            attention_backend=None if backend is None else backend.name,
            reasoning_parser=parser,
            grammar_after_reasoning=parser is not None and not structured.enable_in_reasoning,
        )
