"""Facts of an engine's configuration that the contract's EngineInfo has no place for."""

import dataclasses

from vllm.config import VllmConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What routers of other protocols ask for."""

    tokenizer: str
    """Folder or name on the hub of the model's tokenizer."""
    tokenizer_revision: str | None
    """Its revision on the hub; None means the newest."""
    model_type: str
    """Kind of the model, "llama" for example."""
    architectures: tuple[str, ...]
    """Classes of the model, "LlamaForCausalLM" for example."""
    bos_token_id: int | None
    """The configuration's id of the beginning of a text."""
    pad_token_id: int | None
    """The configuration's id of padding."""
    kv_engine_id: str | None
    """The engine's id among KV connectors; None where there is no connector."""
    kv_cache_dtype: str
    """Element type of the KV cache; "auto" means the model's."""
    attention_backend: str | None
    """Attention backend that was asked for; None where the engine chooses."""
    reasoning_parser: str | None
    """Name of the reasoning parser; None where there is none."""
    grammar_after_reasoning: bool
    """Whether a grammar applies only once the reasoning has ended."""

    @classmethod
    def from_config(cls, config: VllmConfig) -> "EngineFacts":
        """Read the facts."""
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
