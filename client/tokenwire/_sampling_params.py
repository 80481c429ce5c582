"""Sampling parameters, and their conversion to the protobuf messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenwire import _wire
from tokenwire._errors import FieldViolation
from tokenwire.v1 import sampling_params_pb2 as pb


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output: exactly one of the first six fields. The server must run with --keep-tokenizer."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as JSON text or as a mapping."""
    regex: str | None = None
    """A regular expression."""
    choice: Sequence[str] | None = None
    """The possible outputs, at least one."""
    grammar: str | None = None
    """A context-free grammar in the notation of the engine's grammar backend (EBNF)."""
    json_object: bool = False
    """Whether the output must be a JSON object, of any content."""
    structural_tag: str | None = None
    """A structural tag, as JSON text."""

    disable_any_whitespace: bool | None = None
    """Whether the JSON must not contain optional whitespace. Must equal the setting in the engine's
    --structured-outputs-config. None: the engine's setting."""
    disable_additional_properties: bool | None = None
    """Whether JSON objects must have no properties other than the schema's. Must equal the setting in the engine's
    --structured-outputs-config. None: the engine's setting."""
    whitespace_pattern: str | None = None
    """Regular expression for the whitespace allowed in JSON. The server refuses it, since no grammar backend of vLLM
    0.32 honours it. None: the backend's default."""

    def to_proto(self, path: str) -> pb.StructuredOutputsParams:
        """Convert to the protobuf message, which is the request's field `path`. Raises InvalidArgumentError."""
        values = msgspec.structs.asdict(self)
        values["json_object"] = pb.JsonObject() if self.json_object else None
        constraints = pb.StructuredOutputsParams.DESCRIPTOR.oneofs_by_name["constraint"].fields
        given = [field.name for field in constraints if values[field.name] is not None]
        if len(given) != 1:
            names = ", ".join(field.name for field in constraints)
            description = f"exactly one of {names} must be set, not {', '.join(given) or 'none'}"
            raise _wire.invalid(FieldViolation(path, description))
        if isinstance(self.json, Mapping):
            values["json"] = _json_text(f"{path}.json", self.json)
        if self.choice is not None:
            choices = _wire.sequence(f"{path}.choice", self.choice)
            values["choice"] = _wire.build(pb.Choice, f"{path}.choice", {"choices": choices})
        return _wire.build(pb.StructuredOutputsParams, path, values)


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """When to end a sequence that repeats itself."""

    max_pattern_size: int | None = None
    """Maximum length of a repeating pattern, in tokens. None: 0, which disables the detection."""
    min_pattern_size: int | None = None
    """Minimum length of a repeating pattern, in tokens, at most max_pattern_size. None or 0: 1."""
    min_count: int | None = None
    """Number of repetitions that ends the sequence, at least 2. None: 0, which is valid only if the detection is
    disabled."""

    def to_proto(self, path: str) -> pb.RepetitionDetectionParams:
        """Convert to the protobuf message, which is the request's field `path`. Raises InvalidArgumentError."""
        return _wire.build(pb.RepetitionDetectionParams, path, msgspec.structs.asdict(self))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters. Every field has the name and the meaning that it has in vLLM's SamplingParams.

    None means the same default as in vLLM's `/v1/chat/completions`: the value in the model's generation_config.json if
    it has one, else vLLM's default, which each field gives. Zero is a value, not "unset".
    """

    n: int | None = None
    """Number of sequences to generate, at least 1 and at most the engine's max_num_seqs. Must be 1 with greedy sampling
    (temperature 0). The request counts as n requests for admission. None: 1."""
    temperature: float | None = None
    """Sampling temperature, 0 to 2. 0 means greedy sampling; vLLM raises values above 0 and below 0.01 to 0.01. None:
    generation_config, else 1.0."""
    top_p: float | None = None
    """Cumulative probability of the tokens to sample from, above 0 and at most 1. None: generation_config, else 1.0."""
    top_k: int | None = None
    """Number of most likely tokens to sample from. 0 or -1 means all. None: generation_config, else 0."""
    min_p: float | None = None
    """Minimum probability of a token relative to the most likely one, 0 to 1. None: generation_config, else 0.0
    (disabled)."""
    presence_penalty: float | None = None
    """Penalty for tokens that are already in the output, -2 to 2. None: generation_config, else 0.0 (disabled)."""
    frequency_penalty: float | None = None
    """Penalty for tokens, multiplied by their count in the output, -2 to 2. None: generation_config, else 0.0
    (disabled)."""
    repetition_penalty: float | None = None
    """Penalty factor for tokens that are in the prompt or the output, above 0. None: generation_config, else 1.0
    (disabled)."""
    seed: int | None = None
    """Seed of the request's random number generator. With n above 1, sequence i uses seed + i, which may
    not be -1 or above 2^63 - 1 for any sequence. None or -1: no seed."""
    max_tokens: int | None = None
    """Maximum number of tokens to generate per sequence, at least 1. None: the limit of generation_config or the
    server, else what the model's context allows."""
    min_tokens: int | None = None
    """Number of tokens to generate per sequence before EOS or a stop token may end it, at most max_tokens. Until then
    EOS and stop tokens are not sampled, even with ignore_eos, and may not be more than 128. None: 0."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end a sequence, at most 1,024; the stop token is its last token. None or empty: only the model's EOS
    ids."""
    ignore_eos: bool | None = None
    """Whether to continue generating after EOS. None: False."""
    logit_bias: Mapping[int, float] | None = None
    """Bias added to the logits, by token id, at most 1,024 ids; the engine clamps it to -100 to 100. None or empty: no
    bias."""
    logprobs: int | None = None
    """Number of most likely tokens to return log probabilities for at each output position, in addition to the sampled
    token. 0: only the sampled token. -1: the whole vocabulary. None: no log probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return log probabilities for at each prompt position, in addition to the prompt
    token. 0: only the prompt token. -1: the whole vocabulary. None: no prompt log probabilities."""
    logprob_token_ids: Sequence[int] | None = None
    """Token ids to return log probabilities for in place of the most likely ones, in this order, at most 128. None: the
    most likely ones."""
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    """Rows of token ids to return log probabilities for: row i scores its ids as predictions of prompt token
    prompt_logprob_start + i + 1. Rows may differ in length. None: no rows. Needs vLLM's V2 model runner."""
    prompt_logprob_start: int | None = None
    """Index of the first causal prompt row to score with prompt_logprob_token_ids. None: 0."""
    allowed_token_ids: Sequence[int] | None = None
    """Token ids that may be generated, 1 to 1,024. None: all."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Sequences of token ids that must not be generated, at most 128 sequences and 1,024 ids in total. The counterpart
    of vLLM's `bad_words`, which are strings. None or empty: no such sequences."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint on the output. The server must run with --keep-tokenizer. None: no constraint."""
    stream_interval: int | None = None
    """Number of tokens per delta, at least 1; the first and the last token are sent immediately. None: the engine's
    --stream-interval, which is also the minimum."""
    skip_reading_prefix_cache: bool | None = None
    """Whether the request must not read the prefix cache. None: True only if prompt log probabilities are requested."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens, at least 0. -1 or None: no limit. The server must run with a reasoning parser
    and --keep-tokenizer."""
    repetition_detection: RepetitionDetectionParams | None = None
    """When to end a sequence that repeats itself. None: never."""
    watermarking: bool | None = None
    """Whether to apply the engine's watermark. None: True if the engine has one."""
    extra_args_json: str | None = None
    """Arguments for custom sampling code and plug-ins: a JSON object, passed through unchanged. As in every JSON field,
    duplicate keys, numbers beyond 64 bits, NaN and nesting deeper than 64 levels are errors. None: no arguments."""
    routed_experts_prompt_start: int | None = None
    """Number of leading prompt tokens to omit from the returned expert routing. None: 0."""
    trace_decode_token_ids: Sequence[int] | None = None
    """Token ids that the engine returns in place of sampled ones, at least one. None: tokens are sampled. The server
    must run with --enable-trace-replay."""

    def to_proto(self, path: str = "input.sampling_params") -> pb.SamplingParams:
        """Convert to the protobuf message. The server validates what can be encoded.

        Args:
            path: path of the message in the request, for errors.

        Returns:
            The message.

        Raises:
            InvalidArgumentError: values cannot be encoded; it has a violation for every such field.

        """
        values = msgspec.structs.asdict(self)
        if self.stop_token_ids is not None:
            values["stop_token_ids"] = _wire.sequence(f"{path}.stop_token_ids", self.stop_token_ids)
        for name in ("logprob_token_ids", "allowed_token_ids", "trace_decode_token_ids"):
            if values[name] is not None:
                values[name] = _token_ids(f"{path}.{name}", values[name])
        if self.prompt_logprob_token_ids is not None:
            rows = _rows(f"{path}.prompt_logprob_token_ids.rows", self.prompt_logprob_token_ids)
            values["prompt_logprob_token_ids"] = pb.TokenIdRows(rows=rows)
        if self.bad_words_token_ids is not None:
            values["bad_words_token_ids"] = _rows(f"{path}.bad_words_token_ids", self.bad_words_token_ids)
        if self.structured_outputs is not None:
            _wire.check_type(f"{path}.structured_outputs", self.structured_outputs, StructuredOutputsParams)
            values["structured_outputs"] = self.structured_outputs.to_proto(f"{path}.structured_outputs")
        if self.repetition_detection is not None:
            _wire.check_type(f"{path}.repetition_detection", self.repetition_detection, RepetitionDetectionParams)
            values["repetition_detection"] = self.repetition_detection.to_proto(f"{path}.repetition_detection")
        return _wire.build(pb.SamplingParams, path, values)


def _token_ids(path: str, ids: Sequence[int]) -> pb.TokenIds:
    return _wire.build(pb.TokenIds, path, {"token_ids": _wire.sequence(path, ids)})


def _rows(path: str, rows: Sequence[Sequence[int]]) -> list[pb.TokenIds]:
    found = []
    for index, row in enumerate(_wire.elements(path, rows, "sequences of token ids")):
        place = f"{path}[{index}]"
        found.append(_token_ids(place, _wire.elements(place, row, "token ids")))
    return found


def _json_text(path: str, schema: Mapping[str, Any]) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise _wire.invalid(FieldViolation(path, f"must be JSON: {error}")) from None
