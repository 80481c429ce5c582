"""What an engine is and can do. None means not known, a present zero is a fact."""

import msgspec

from tokenwire import _wire
from tokenwire.v1 import engine_info_pb2 as pb


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter."""

    name: str
    """Name that requests use."""
    path: str
    """Where it was loaded from."""

    @classmethod
    def from_proto(cls, message: pb.Adapter) -> "Adapter":
        """Convert the contract's message."""
        return cls(message.name, message.path)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an engine and its server."""

    max_num_seqs: int | None = None
    """Most sequences in one step; also the highest n."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step."""
    max_logprobs: int | None = None
    """Most log probabilities for each token; the vocabulary's size where the engine sets no limit."""
    max_num_queued_reqs: int | None = None
    """Most unfinished sequences before requests are refused. None: no limit."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens in prefill from which on requests are refused. None: no limit."""
    max_receive_message_bytes: int | None = None
    """Largest message that the server takes."""
    max_send_message_bytes: int | None = None
    """Largest message that the server sends."""

    @classmethod
    def from_proto(cls, message: pb.Limits) -> "Limits":
        """Convert the contract's message."""
        return cls(**_wire.optional(cls, message))


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is spread over devices."""

    data_parallel_size: int | None = None
    """Number of data-parallel ranks."""
    tensor_parallel_size: int | None = None
    """Tensor-parallel size of each rank."""
    pipeline_parallel_size: int | None = None
    """Pipeline-parallel size of each rank."""

    @classmethod
    def from_proto(cls, message: pb.Parallelism) -> "Parallelism":
        """Convert the contract's message."""
        return cls(**_wire.optional(cls, message))


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine's KV cache, for routers that compute block hashes."""

    block_size: int | None = None
    """Tokens in a block."""
    num_blocks: int | None = None
    """Number of blocks of one rank."""
    prefix_caching: bool | None = None
    """Whether prefixes are cached."""
    prefix_caching_hash_algo: str | None = None
    """Name of the hash function of the prefix cache, "sha256" for example."""
    hash_seed: str | None = None
    """Value of PYTHONHASHSEED, which seeds the first block's hash. None: not set, hashes differ between processes."""
    kv_connector: str | None = None
    """Name of the KV connector. None: there is none."""
    kv_role: str | None = None
    """The KV connector's role. None: there is no connector."""
    kv_events_endpoints: tuple[str, ...] = ()
    """Where each rank publishes its KV events, the first for rank 0. Empty: KV events are off."""

    @classmethod
    def from_proto(cls, message: pb.KvCache) -> "KvCache":
        """Convert the contract's message."""
        return cls(**_wire.optional(cls, message), kv_events_endpoints=tuple(message.kv_events_endpoints))


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and can do."""

    model: str
    """The base model as the server was asked to load it: a name or a folder."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use for the base model, the first one preferred."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that requests may name."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together."""
    vocab_size: int | None = None
    """Size of the vocabulary: ids from 0 to below it are valid."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a sequence: the tokenizer's EOS first, then the further ones of the model's configuration."""
    dtype: str | None = None
    """Element type of the model's weights, "bfloat16" for example."""
    limits: Limits
    """What a request may ask for."""
    parallelism: Parallelism
    """How the engine is spread over devices."""
    kv_cache: KvCache
    """The KV cache."""
    contract_revision: int
    """Revision of the contract that the server was built from; compare with `tokenwire.CONTRACT_REVISION`."""
    features: frozenset[str] = frozenset()
    """Names of what the server supports beside the contract's core, "multiplex" for example."""
    tokenwire_version: str
    """The server's version of tokenwire."""
    vllm_version: str | None = None
    """The server's version of vLLM."""

    @classmethod
    def from_proto(cls, message: pb.EngineInfo) -> "EngineInfo":
        """Convert the contract's message."""
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
