"""Each sampling field arrives in the engine as it was set, and one that is not set means what the contract says."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

from fake_engine import FakeEngineServer, failure_of, make_config, within
from fake_engine.core import EOS, MAX_MODEL_LEN
from tokenwire.v1 import sampling_params_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.conversion.request import to_engine_request

IDS = pb.TokenIds(token_ids=[7, 5])

# Field of the contract, value, vLLM's field, what the engine process must get.
ARRIVES: list[tuple[str, Any, str, Any]] = [
    ("n", 1, "n", 1),
    ("temperature", 0.7, "temperature", 0.7),
    ("temperature", 0.0, "temperature", 0.0),
    ("top_p", 0.9, "top_p", 0.9),
    ("top_k", 40, "top_k", 40),
    ("top_k", 0, "top_k", 0),
    ("top_k", -1, "top_k", -1),
    ("min_p", 0.05, "min_p", 0.05),
    ("presence_penalty", -1.5, "presence_penalty", -1.5),
    ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
    ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
    ("seed", 2**62 + 1, "seed", 2**62 + 1),
    ("seed", 0, "seed", 0),
    ("seed", -1, "seed", None),
    ("seed", -2, "seed", -2),
    ("seed", 2**63 - 1, "seed", 2**63 - 1),
    ("max_tokens", 5, "max_tokens", 5),
    ("max_tokens", 2**32 - 1, "max_tokens", MAX_MODEL_LEN - 3),
    ("min_tokens", 4, "min_tokens", 4),
    ("stop_token_ids", [9, 8], "stop_token_ids", [9, 8]),
    ("stop_token_ids", [9, 8] * 512, "stop_token_ids", [9, 8]),
    ("ignore_eos", True, "ignore_eos", True),
    ("logit_bias", {7: 1.5, 8: -200.0, 9: 200.0}, "logit_bias", {7: 1.5, 8: -100.0, 9: 100.0}),
    ("logprobs", 0, "logprobs", 0),
    ("logprobs", 3, "logprobs", 3),
    ("prompt_logprobs", 0, "prompt_logprobs", 0),
    ("prompt_logprobs", 2, "prompt_logprobs", 2),
    ("logprob_token_ids", IDS, "logprob_token_ids", [7, 5]),
    ("allowed_token_ids", IDS, "allowed_token_ids", [7, 5]),
    ("bad_words_token_ids", [IDS, pb.TokenIds(token_ids=[1])], "_bad_words_token_ids", [[7, 5], [1]]),
    ("stream_interval", 4, "stream_interval", 4),
    ("skip_reading_prefix_cache", True, "skip_reading_prefix_cache", True),
    ("skip_reading_prefix_cache", False, "skip_reading_prefix_cache", False),
    (
        "repetition_detection",
        pb.RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3),
        "repetition_detection",
        RepetitionDetectionParams(4, 2, 3),
    ),
    ("watermarking", False, "watermarking", False),
    ("extra_args_json", '{"a": {"b": [5600, 1.5, null]}}', "extra_args", {"a": {"b": [5600, 1.5, None]}}),
    ("routed_experts_prompt_start", 2, "routed_experts_prompt_start", 2),
]

# What this machine's engine or one without a tokenizer refuses, as the server hands it over.
HANDED_OVER: list[tuple[str, Any, str, Any]] = [
    ("thinking_token_budget", 5, "thinking_token_budget", 5),
    ("thinking_token_budget", 0, "thinking_token_budget", 0),
    ("trace_decode_token_ids", IDS, "trace_decode_token_ids", [7, 5]),
    (
        "structured_outputs",
        pb.StructuredOutputsParams(json='{"type": "object"}', disable_any_whitespace=True, whitespace_pattern=" ?"),
        "structured_outputs",
        StructuredOutputsParams(json='{"type": "object"}', disable_any_whitespace=True, whitespace_pattern=" ?"),
    ),
    (
        "structured_outputs",
        pb.StructuredOutputsParams(regex="a+", disable_additional_properties=True),
        "structured_outputs",
        StructuredOutputsParams(regex="a+", disable_additional_properties=True),
    ),
    (
        "structured_outputs",
        pb.StructuredOutputsParams(choice=pb.Choice(choices=["a", "b"])),
        "structured_outputs",
        StructuredOutputsParams(choice=["a", "b"]),
    ),
    (
        "structured_outputs",
        pb.StructuredOutputsParams(grammar='root ::= "a"'),
        "structured_outputs",
        StructuredOutputsParams(grammar='root ::= "a"'),
    ),
    (
        "structured_outputs",
        pb.StructuredOutputsParams(json_object=pb.JsonObject()),
        "structured_outputs",
        StructuredOutputsParams(json_object=True),
    ),
    (
        "structured_outputs",
        pb.StructuredOutputsParams(structural_tag="{}"),
        "structured_outputs",
        StructuredOutputsParams(structural_tag="{}"),
    ),
]

# Covered by a test of its own below.
ELSEWHERE = {"prompt_logprob_token_ids", "prompt_logprob_start"}

NOT_IN_CONTRACT = {
    "stop": "the caller detokenizes, so it looks for stop strings",
    "bad_words": "strings need a tokenizer; bad_words_token_ids stands in",
    "extra_args": "extra_args_json",
    "detokenize": "never here",
    "skip_special_tokens": "detokenizing",
    "spaces_between_special_tokens": "detokenizing",
    "include_stop_str_in_output": "detokenizing",
    "output_text_buffer_length": "detokenizing; vLLM fills it itself",
    "flat_logprobs": "how the server gets its log probabilities",
    "output_kind": "which RPC is called",
    "skip_clone": "how the server hands the parameters over",
}
NOT_IN_VLLM = {"bad_words_token_ids", "extra_args_json"}


async def sent(server: FakeEngineServer, **fields: Any) -> SamplingParams:
    """Return what the engine process gets for a request with these sampling fields."""
    call = server.generate(sampling=pb.SamplingParams(**fields))
    [request, *others] = await server.core.next_requests(fields.get("n", 1))
    for sequence in (request, *others):
        sequence.step(5, finish="length")
    await within(call)
    return request.params


def same(found: Any, expected: Any) -> bool:
    """Whether two values are equal, also in type: 1 is neither True nor 1.0."""
    return type(found) is type(expected) and bool(found == expected)


@pytest.mark.parametrize(("field", "value", "name", "expected"), ARRIVES, ids=lambda value: str(value)[:30].strip())
async def test_a_field_arrives(server: FakeEngineServer, field: str, value: Any, name: str, expected: Any) -> None:
    """FIELD_LOG 47, 49."""
    found = getattr(await sent(server, **{field: value}), name)
    if field == "stop_token_ids":
        found = sorted(found, reverse=True)
    assert same(found, expected)


@pytest.mark.parametrize(("field", "value", "name", "expected"), HANDED_OVER)
async def test_a_field_is_handed_over(
    vllm_config: VllmConfig, field: str, value: Any, name: str, expected: Any
) -> None:
    async with FakeEngineServer.run(vllm_config, keep_tokenizer=True) as server:
        message = GenerationInput(prompt_token_ids=[1], sampling_params=pb.SamplingParams(**{field: value}))
        limits = server.engine.limits
        params = to_engine_request(message, limits, {}, request_id="a", trace_headers=None, stream=False).params
        assert same(getattr(params, name), expected)


async def test_rows_of_prompt_logprob_token_ids_are_handed_over_padded(server: FakeEngineServer) -> None:
    rows = pb.TokenIdRows(rows=[pb.TokenIds(token_ids=[7, 5]), pb.TokenIds(token_ids=[9])])
    sampling = pb.SamplingParams(prompt_logprob_token_ids=rows, prompt_logprob_start=1)
    message = GenerationInput(prompt_token_ids=[1, 2, 3, 4], sampling_params=sampling)
    params = server.engine.convert(message, request_id="a", stream=False).params
    assert np.array_equal(params.prompt_logprob_token_ids, [[7, 5], [9, -1]])
    assert params.prompt_logprob_start == 1


def test_every_field_of_the_contract_is_tested() -> None:
    fields = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert fields == {row[0] for row in ARRIVES} | {row[0] for row in HANDED_OVER} | ELSEWHERE


def test_every_field_of_vllm_is_in_the_contract_or_left_out_for_a_reason() -> None:
    """FIELD_LOG 47, 49."""
    theirs = {field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")}
    ours = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert theirs - ours == set(NOT_IN_CONTRACT)
    assert ours - theirs == NOT_IN_VLLM


def test_every_constraint_of_structured_outputs_is_tested() -> None:
    kinds = {field.name for field in pb.StructuredOutputsParams.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    assert kinds == {
        value.WhichOneof("constraint") for field, value, _, _ in HANDED_OVER if field == "structured_outputs"
    }


async def test_what_is_not_set_is_vllms_default(server: FakeEngineServer) -> None:
    """FIELD_LOG 45, S10."""
    params = await sent(server)
    expected = SamplingParams(max_tokens=MAX_MODEL_LEN - 3, detokenize=False, flat_logprobs=True, skip_clone=True)
    ignored = {"output_kind", "watermarking"}
    for field in msgspec.structs.fields(SamplingParams):
        if not field.name.startswith("_") and field.name not in ignored:
            assert getattr(params, field.name) == getattr(expected, field.name), field.name


async def test_a_field_that_is_set_to_its_default_is_not_taken_as_unset(tmp_path: Path) -> None:
    """FIELD_LOG 46."""
    config = with_generation_config(tmp_path, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    async with FakeEngineServer.run(config) as server:
        params = await sent(server, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.0, 1.0, 0, 1.0)


async def test_what_is_not_set_comes_from_generation_config(tmp_path: Path) -> None:
    """FIELD_LOG 46."""
    config = with_generation_config(
        tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05, max_new_tokens=11
    )
    async with FakeEngineServer.run(config) as server:
        params = await sent(server)
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.95, 20, 0.01)
        assert (params.repetition_penalty, params.max_tokens) == (1.05, 11)
        # The model's own file is a default, not a limit.
        assert (await sent(server, max_tokens=20)).max_tokens == 20


async def test_a_limit_that_the_operator_sets_holds_for_every_request(tmp_path: Path) -> None:
    config = make_config(tmp_path, override_generation_config={"max_new_tokens": 9})
    async with FakeEngineServer.run(config) as server:
        assert (await sent(server)).max_tokens == 9
        assert (await sent(server, max_tokens=20)).max_tokens == 9
        assert (await sent(server, max_tokens=5)).max_tokens == 5


def with_generation_config(folder: Path, **values: Any) -> VllmConfig:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return make_config(folder)


async def test_zero_min_tokens_does_not_clash_with_a_small_max_tokens(server: FakeEngineServer) -> None:
    params = await sent(server, min_tokens=0, max_tokens=1)
    assert (params.min_tokens, params.max_tokens) == (0, 1)


async def test_ids_up_to_the_end_of_the_vocabulary_are_taken(server: FakeEngineServer) -> None:
    last = server.engine.limits.vocab_size - 1
    params = await sent(server, stop_token_ids=[last], logit_bias={last: 1.0})
    assert last in params.stop_token_ids
    assert params.logit_bias == {last: 1.0}


async def test_the_tokenizers_eos_is_told_apart_from_stop_tokens(server: FakeEngineServer) -> None:
    params = await sent(server)
    assert params.eos_token_id == EOS
    assert params.stop_token_ids == []


async def test_further_eos_ids_of_the_model_are_stop_tokens(tmp_path: Path) -> None:
    async with FakeEngineServer.run(with_generation_config(tmp_path, eos_token_id=[EOS, 30])) as server:
        params = await sent(server)
        assert params.eos_token_id == EOS
        assert params.stop_token_ids == [30]
        assert (await sent(server, ignore_eos=True)).stop_token_ids == []


async def test_each_sequence_of_a_request_has_its_own_seed(server: FakeEngineServer) -> None:
    call = server.generate(sampling={"n": 3, "seed": 40})
    sequences = await server.core.next_requests(3)
    assert [sequence.params.seed for sequence in sequences] == [40, 41, 42]
    for sequence in sequences:
        sequence.step(5, finish="length")
    assert len((await within(call)).outputs) == 3


@pytest.mark.parametrize(("seed", "expected"), [(-4, [-4, -3, -2]), (-1, [None] * 3), (2**63 - 3, None)])
async def test_seeds_next_to_none_and_to_the_end(
    server: FakeEngineServer, seed: int, expected: list[int | None] | None
) -> None:
    """FAULTS B7."""
    call = server.generate(sampling={"n": 3, "seed": seed})
    sequences = await server.core.next_requests(3)
    assert [sequence.params.seed for sequence in sequences] == (expected or [seed, seed + 1, seed + 2])
    for sequence in sequences:
        sequence.step(5, finish="length")
    assert len((await within(call)).outputs) == 3


@pytest.mark.parametrize("temperature", [1e-6, 0.005, 0.01])
async def test_several_sequences_at_a_temperature_that_is_raised(server: FakeEngineServer, temperature: float) -> None:
    """FAULTS B6."""
    call = server.generate(sampling={"n": 2, "temperature": temperature})
    sequences = await server.core.next_requests(2)
    assert [sequence.params.temperature for sequence in sequences] == [0.01, 0.01]
    for sequence in sequences:
        sequence.step(5, finish="length")
    assert len((await within(call)).outputs) == 2


async def test_vllm_gets_no_thinking_budget_without_a_reasoning_parser(server: FakeEngineServer) -> None:
    failure = await failure_of(server.generate(sampling={"thinking_token_budget": 5}))
    assert failure.fields == ("input.sampling_params.thinking_token_budget",)
