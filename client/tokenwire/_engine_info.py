"""An engine's model, limits and features. None means unknown; zero is a value."""

import msgspec

from tokenwire import _wire
from tokenwire.v1 import engine_info_pb2 as pb


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter."""

    name: str
    """Name of the adapter in requests."""
    path: str
    """Path that the adapter was loaded from, on the server."""

    @classmethod
    def from_proto(cls, message: pb.Adapter) -> "Adapter":
        """Convert from the protobuf message."""
        return cls(message.name, message.path)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an engine and its server. None: unknown, unless the field says otherwise."""

    max_num_seqs: int | None = None
    """Maximum number of sequences in one engine step; also the maximum n."""
    max_num_batched_tokens: int | None = None
    """Maximum number of tokens in one engine step."""
    max_logprobs: int | None = None
    """Maximum number of log probabilities per token; the size of the vocabulary if the engine sets no limit."""
    max_num_queued_reqs: int | None = None
    """Maximum number of unfinished sequences; more are refused with QUEUE_FULL. None: no limit."""
    max_num_queued_tokens: int | None = None
    """Maximum number of prompt tokens in prefill; at that number, requests are refused with QUEUED_TOKENS_LIMIT. None:
    no limit."""
    max_receive_message_bytes: int | None = None
    """Maximum size of a message that the server receives, in bytes."""
    max_send_message_bytes: int | None = None
    """Maximum size of a message that the server sends, in bytes."""

    @classmethod
    def from_proto(cls, message: pb.Limits) -> "Limits":
        """Convert from the protobuf message."""
        return cls(**_wire.optional(cls, message))


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is distributed over devices. None means unknown."""

    data_parallel_size: int | None = None
    """Number of data-parallel ranks."""
    tensor_parallel_size: int | None = None
    """Tensor-parallel size of each data-parallel rank."""
    pipeline_parallel_size: int | None = None
    """Pipeline-parallel size of each data-parallel rank."""

    @classmethod
    def from_proto(cls, message: pb.Parallelism) -> "Parallelism":
        """Convert from the protobuf message."""
        return cls(**_wire.optional(cls, message))


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's KV cache, for routers that compute block hashes. None: unknown, unless the field says otherwise."""

    block_size: int | None = None
    """Number of tokens in a block."""
    num_blocks: int | None = None
    """Number of blocks of each data-parallel rank."""
    prefix_caching: bool | None = None
    """Whether prefix caching is enabled."""
    prefix_caching_hash_algo: str | None = None
    """Hash function of the prefix cache, "sha256" for example."""
    hash_seed: str | None = None
    """Value of PYTHONHASHSEED, which seeds the first block's hash. None: not set, and hashes differ between
    processes."""
    kv_connector: str | None = None
    """Name of the KV connector. None: no connector."""
    kv_role: str | None = None
    """Role of the KV connector. None: no connector."""
    kv_events_endpoints: tuple[str, ...] = ()
    """Endpoint at which each data-parallel rank publishes its KV events, by rank. Empty: KV events are disabled."""

    @classmethod
    def from_proto(cls, message: pb.KvCache) -> "KvCache":
        """Convert from the protobuf message."""
        return cls(**_wire.optional(cls, message), kv_events_endpoints=tuple(message.kv_events_endpoints))


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's model, limits, features and versions."""

    model: str
    """The base model, as the server was asked to load it: a name or a folder."""
    served_model_names: tuple[str, ...] = ()
    """Names of the base model in requests, the preferred one first."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that are available to requests."""
    max_model_len: int | None = None
    """Maximum number of prompt and output tokens together. None: unknown."""
    vocab_size: int | None = None
    """Size of the vocabulary; valid token ids are 0 to vocab_size - 1. None: unknown."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end a sequence: the tokenizer's EOS, then the other EOS ids of the model's configuration."""
    dtype: str | None = None
    """Data type of the model's weights, "bfloat16" for example. None: unknown."""
    limits: Limits
    """Limits on requests and messages."""
    parallelism: Parallelism
    """How the engine is distributed over devices."""
    kv_cache: KvCache
    """The KV cache."""
    contract_revision: int
    """Contract revision that the server was built from; this client's is `tokenwire.CONTRACT_REVISION`."""
    features: frozenset[str] = frozenset()
    """Optional features that the server supports, "multiplex" for example."""
    tokenwire_version: str
    """Version of tokenwire on the server."""
    vllm_version: str | None = None
    """Version of vLLM on the server. None: unknown."""

    @classmethod
    def from_proto(cls, message: pb.EngineInfo) -> "EngineInfo":
        """Convert from the protobuf message."""
        return cls(
            model=message.model,
            served_model_names=tuple(message.served_model_names),
            adapters=tuple(Adapter.from_proto(adapter) for adapter in message.adapters),
            eos_token_ids=tuple(message.eos_token_ids),
            limits=Limits.from_proto(message.limits),
            parallelism=Parallelism.from_proto(message.parallelism),
            kv_cache=KvCache.from_proto(message.kv_cache),
            contract_revision=message.contract_revision,
            features=frozenset(message.features),
            tokenwire_version=message.tokenwire_version,
            **{name: _wire.present(message, name) for name in ("max_model_len", "vocab_size", "dtype", "vllm_version")},
        )
