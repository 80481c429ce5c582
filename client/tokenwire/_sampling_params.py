"""How tokens are sampled: the typed face of the contract's SamplingParams."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenwire import _wire
from tokenwire._errors import FieldViolation
from tokenwire.v1 import sampling_params_pb2 as pb


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output: exactly one of the first six. Needs a server started with --keep-tokenizer."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a mapping that is sent as JSON text."""
    regex: str | None = None
    """A regular expression."""
    choice: Sequence[str] | None = None
    """The texts that the output may be, at least one."""
    grammar: str | None = None
    """A context-free grammar in the backend's own notation (EBNF)."""
    json_object: bool = False
    """Whether any JSON object will do."""
    structural_tag: str | None = None
    """A structural tag, as JSON text."""

    disable_any_whitespace: bool | None = None
    """Whether JSON may hold no free whitespace. None: False."""
    disable_additional_properties: bool | None = None
    """Whether JSON objects may hold no properties beside those of the schema. None: False."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace allowed in JSON. None: the backend's own."""

    def to_proto(self, path: str) -> pb.StructuredOutputsParams:
        """Convert; `path` is the field's place in the request. Raises InvalidArgumentError."""
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
            _wire.not_text(f"{path}.choice", self.choice)
            values["choice"] = _wire.build(pb.Choice, f"{path}.choice", {"choices": self.choice})
        return _wire.build(pb.StructuredOutputsParams, path, values)


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """When to take an output for an endless repetition."""

    max_pattern_size: int | None = None
    """Longest repeating pattern to look for, in tokens. None: 0, which turns detection off."""
    min_pattern_size: int | None = None
    """Shortest repeating pattern to look for, in tokens, at most max_pattern_size. None or 0: 1."""
    min_count: int | None = None
    """Number of repetitions that ends the sequence, at least 2. None: 0, valid only while detection is off."""

    def to_proto(self, path: str) -> pb.RepetitionDetectionParams:
        """Convert; `path` is the field's place in the request. Raises InvalidArgumentError."""
        return _wire.build(pb.RepetitionDetectionParams, path, msgspec.structs.asdict(self))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled; every field is named as in vLLM's SamplingParams and means the same.

    None means what `/v1/chat/completions` would do: the value of the model's generation_config.json where it has one,
    else vLLM's default, which is given below. Zero is a value, not "unset".
    """

    n: int | None = None
    """Number of output sequences for the prompt, at least 1. None: 1, the only one that greedy sampling allows."""
    temperature: float | None = None
    """Randomness, 0 to 2; 0 means greedy. None: generation_config, else 1.0."""
    top_p: float | None = None
    """Cumulative probability of the tokens to consider, above 0 and at most 1. None: generation_config, else 1.0."""
    top_k: int | None = None
    """Number of most likely tokens to consider; 0 or -1 means all. None: generation_config, else 0."""
    min_p: float | None = None
    """Least probability relative to that of the most likely token, 0 to 1. None: generation_config, else 0.0 (off)."""
    presence_penalty: float | None = None
    """Penalty for tokens that the output already holds, -2 to 2. None: 0.0 (off)."""
    frequency_penalty: float | None = None
    """Penalty for tokens by their count in the output, -2 to 2. None: 0.0 (off)."""
    repetition_penalty: float | None = None
    """Penalty factor for tokens of the prompt or the output, above 0. None: generation_config, else 1.0 (off)."""
    seed: int | None = None
    """Seed of this request's random numbers; with n above 1 sequence i uses seed + i. None or -1: no seed."""
    max_tokens: int | None = None
    """Most tokens to generate for each sequence, at least 1. None: up to the end of the model's context, or the limit
    that generation_config or the server sets."""
    min_tokens: int | None = None
    """Tokens to generate before EOS or a stop token may end a sequence, at most max_tokens. None: 0."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end a sequence; the stop token is the last of its tokens. None or empty: only the model's EOS."""
    ignore_eos: bool | None = None
    """Whether to go on after EOS. None: False."""
    logit_bias: Mapping[int, float] | None = None
    """Values added to the logits of token ids, each limited to -100 to 100 by the engine. None or empty: none."""
    logprobs: int | None = None
    """Number of most likely tokens to report for each output token, beside the sampled one; 0 reports the sampled
    token alone, -1 the whole vocabulary. None: no log probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report for each prompt token, beside that token; -1 means the whole vocabulary.
    None: none."""
    logprob_token_ids: Sequence[int] | None = None
    """Token ids to report in place of the most likely ones, in this order, at most 128. None: the most likely ones."""
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    """Rows of token ids to score for each causal prompt row. None: none. Needs vLLM's V2 model runner."""
    prompt_logprob_start: int | None = None
    """First causal prompt row to score, with prompt_logprob_token_ids. None: the first."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be generated, at least one. None: all."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Sequences of token ids that may not be generated, at most 128 with 1,024 ids together; in place of vLLM's
    `bad_words`, which are strings. None or empty: none."""
    structured_outputs: StructuredOutputsParams | None = None
    """A grammar for the output. None: none."""
    stream_interval: int | None = None
    """Number of new tokens to gather before a stream sends them, at least 1. None: the engine's --stream-interval,
    which is also the least."""
    skip_reading_prefix_cache: bool | None = None
    """Whether the request may not read the prefix cache. None: True only where prompt log probabilities are asked for."""
    thinking_token_budget: int | None = None
    """Most tokens to spend on reasoning, at least 0; -1 means no limit. None: no limit. Needs a server with a reasoning
    parser and --keep-tokenizer."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends a sequence that repeats itself. None: off."""
    watermarking: bool | None = None
    """Whether the engine's watermark is applied. None: yes where the engine has one."""
    extra_args_json: str | None = None
    """Arguments for custom sampling code and plug-ins: a JSON object, passed on verbatim. None: none."""
    routed_experts_prompt_start: int | None = None
    """Number of leading prompt tokens to leave out of the returned expert routing. None: 0."""
    trace_decode_token_ids: Sequence[int] | None = None
    """Token ids that the engine must emit in place of sampled ones, at least one. None: tokens are sampled. Needs a
    server with --enable-trace-replay."""

    def to_proto(self, path: str = "input.sampling_params") -> pb.SamplingParams:
        """Convert to the contract's message.

        `path` is the message's place in the request, for the errors. Raises InvalidArgumentError, with every field at
        fault, for values that the message cannot hold; whether they make sense is for the server to say.
        """
        values = msgspec.structs.asdict(self)
        if self.stop_token_ids is not None:
            _wire.not_text(f"{path}.stop_token_ids", self.stop_token_ids)
        for name in ("logprob_token_ids", "allowed_token_ids", "trace_decode_token_ids"):
            if values[name] is not None:
                values[name] = _token_ids(f"{path}.{name}", values[name])
        if self.prompt_logprob_token_ids is not None:
            rows = _rows(f"{path}.prompt_logprob_token_ids.rows", self.prompt_logprob_token_ids)
            values["prompt_logprob_token_ids"] = pb.TokenIdRows(rows=rows)
        if self.bad_words_token_ids is not None:
            values["bad_words_token_ids"] = _rows(f"{path}.bad_words_token_ids", self.bad_words_token_ids)
        if self.structured_outputs is not None:
            values["structured_outputs"] = self.structured_outputs.to_proto(f"{path}.structured_outputs")
        if self.repetition_detection is not None:
            values["repetition_detection"] = self.repetition_detection.to_proto(f"{path}.repetition_detection")
        return _wire.build(pb.SamplingParams, path, values)


def _token_ids(path: str, ids: Sequence[int]) -> pb.TokenIds:
    _wire.not_text(path, ids)
    return _wire.build(pb.TokenIds, path, {"token_ids": ids})


def _rows(path: str, rows: Sequence[Sequence[int]]) -> list[pb.TokenIds]:
    return [_token_ids(f"{path}[{index}]", row) for index, row in enumerate(rows)]


def _json_text(path: str, schema: Mapping[str, Any]) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise _wire.invalid(FieldViolation(path, f"must be JSON: {error}")) from None
