"""A request that cannot be served is refused with the field at fault, and the engine serves the next one."""

import asyncio
import math
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig

from fake_engine import Failure, FakeEngineServer, collect, failure_of, within
from fake_engine.core import MAX_MODEL_LEN, MAX_NUM_SEQS, VOCAB_SIZE
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire.v1.sampling_params_pb2 import (
    Choice,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
    TokenIdRows,
    TokenIds,
)

OUT_OF_VOCAB = TokenIds(token_ids=[1, VOCAB_SIZE])
DEEP = '{"a":' * 2000 + "1" + "}" * 2000
REGEX = StructuredOutputsParams(regex="a")


async def refusal(server: FakeEngineServer, **fields: Any) -> Failure:
    """Send what must be refused, by both RPCs; check that nothing of it is left and the engine serves the next."""
    prompt = fields.pop("prompt_token_ids", [1, 2, 3])
    failure = await failure_of(server.generate(prompt, **fields))
    assert await failure_of(server.stream(prompt, **fields).read()) == failure
    assert len(server.registry) == 0
    assert server.core.idle
    assert server.engine.unfinished == 0
    await server.check_alive()
    return failure


BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, VOCAB_SIZE, 2]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [2**31]}, "prompt_token_ids[0]"),
    ({"prompt_token_ids": [2**32 - 1]}, "prompt_token_ids[0]"),
    ({"prompt_token_ids": [1] * MAX_MODEL_LEN}, "prompt_token_ids"),
    ({"prompt_token_ids": [1] * 100_000}, "prompt_token_ids"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "é"}, "request_id"),
    ({"request_id": "a\n"}, "request_id"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"model": ""}, "model"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"data_parallel_rank": 1}, "data_parallel_rank"),
    ({"max_time": Duration()}, "max_time"),
    ({"max_time": Duration(seconds=-1)}, "max_time"),
    ({"kv_transfer_params_json": ""}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": "[1]"}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": "{"}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": '{"a": {"b": 1, "b": 1}}'}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": '{"a": NaN}'}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": '{"a": 18446744073709551616}'}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": '{"a": [-9223372036854775809]}'}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": '{"a": "\\ud800"}'}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": '{"\\udfff": 1}'}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": DEEP}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": '{"a": 1' + "0" * 5000 + "}"}, "kv_transfer_params_json"),
    ({"ec_transfer_params_json": "null"}, "ec_transfer_params_json"),
    ({"kv_hints_json": '{"protocol_version": 1}'}, "kv_hints_json"),
    ({"kv_hints_json": "[]"}, "kv_hints_json"),
    (
        {"kv_transfer_params_json": "{}", "sampling": {"extra_args_json": '{"kv_transfer_params": {}}'}},
        "kv_transfer_params_json",
    ),
]

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": MAX_NUM_SEQS + 1}, "n"),
    ({"n": 2**32 - 1}, "n"),
    ({"n": 2, "temperature": 0.0}, "n"),
    *[({"temperature": value}, "temperature") for value in (-0.1, 2.1, math.nan, math.inf, -math.inf)],
    *[({"presence_penalty": value}, "presence_penalty") for value in (-2.1, 2.1, math.nan, math.inf)],
    *[({"frequency_penalty": value}, "frequency_penalty") for value in (-2.1, 2.1, math.nan, math.inf)],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0.0, -1.0, math.nan, math.inf)],
    *[({"top_p": value}, "top_p") for value in (0.0, 1.1, -1.0, math.nan, math.inf)],
    *[({"min_p": value}, "min_p") for value in (-0.1, 1.1, math.nan)],
    ({"top_k": -2}, "top_k"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": MAX_MODEL_LEN}, "min_tokens"),
    ({"stop_token_ids": [1, VOCAB_SIZE]}, "stop_token_ids[1]"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias[{VOCAB_SIZE}]"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"allowed_token_ids": OUT_OF_VOCAB}, "allowed_token_ids.token_ids[1]"),
    ({"allowed_token_ids": TokenIds()}, "allowed_token_ids.token_ids"),
    ({"bad_words_token_ids": [OUT_OF_VOCAB]}, "bad_words_token_ids[0].token_ids[1]"),
    ({"bad_words_token_ids": [TokenIds(token_ids=[1]), TokenIds()]}, "bad_words_token_ids[1].token_ids"),
    ({"bad_words_token_ids": [TokenIds(token_ids=[1])] * 129}, "bad_words_token_ids"),
    ({"bad_words_token_ids": [TokenIds(token_ids=[1] * 1025)]}, "bad_words_token_ids"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    # More than any message could hold, which is not what is wrong with it.
    ({"prompt_logprobs": 2**31 - 1}, "prompt_logprobs"),
    ({"logprob_token_ids": OUT_OF_VOCAB}, "logprob_token_ids.token_ids[1]"),
    ({"logprob_token_ids": TokenIds()}, "logprob_token_ids.token_ids"),
    ({"logprob_token_ids": TokenIds(token_ids=range(129))}, "logprob_token_ids"),
    ({"logprob_token_ids": TokenIds(token_ids=[5, 5])}, "logprob_token_ids.token_ids"),
    ({"logprob_token_ids": TokenIds(token_ids=[5]), "logprobs": 2}, "logprob_token_ids"),
    ({"prompt_logprob_token_ids": TokenIdRows()}, "prompt_logprob_token_ids"),
    (
        {"prompt_logprob_token_ids": TokenIdRows(rows=[OUT_OF_VOCAB])},
        "prompt_logprob_token_ids.rows[0].token_ids[1]",
    ),
    (
        {"prompt_logprob_token_ids": TokenIdRows(rows=[TokenIds(token_ids=[1])])},
        "prompt_logprob_token_ids",
    ),
    ({"prompt_logprob_start": 0}, "prompt_logprob_start"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"trace_decode_token_ids": OUT_OF_VOCAB}, "trace_decode_token_ids.token_ids[1]"),
    ({"trace_decode_token_ids": TokenIds(token_ids=[1])}, "trace_decode_token_ids"),
    ({"trace_decode_token_ids": TokenIds(token_ids=[1]), "n": 2}, "trace_decode_token_ids"),
    ({"trace_decode_token_ids": TokenIds(token_ids=[1]), "prompt_logprobs": 1}, "trace_decode_token_ids"),
    (
        {
            "trace_decode_token_ids": TokenIds(token_ids=[1]),
            "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=2),
        },
        "trace_decode_token_ids",
    ),
    ({"routed_experts_prompt_start": 4}, "routed_experts_prompt_start"),
    ({"repetition_detection": RepetitionDetectionParams(min_pattern_size=1)}, "repetition_detection.min_pattern_size"),
    ({"repetition_detection": RepetitionDetectionParams(max_pattern_size=2)}, "repetition_detection.min_count"),
    ({"extra_args_json": '{"a": 1, "a": 1}'}, "extra_args_json"),
    ({"extra_args_json": '"text"'}, "extra_args_json"),
    ({"structured_outputs": StructuredOutputsParams()}, "structured_outputs.constraint"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_INPUTS, ids=lambda value: str(value)[:60])
async def test_a_bad_field_of_the_input(server: FakeEngineServer, fields: dict[str, Any], field: str) -> None:
    """FIELD_LOG 48, S1."""
    failure = await refusal(server, **fields)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == (f"input.{field}",)


@pytest.mark.parametrize(("sampling", "field"), BAD_SAMPLING, ids=lambda value: str(value)[:60])
async def test_a_bad_sampling_field(server: FakeEngineServer, sampling: dict[str, Any], field: str) -> None:
    """FIELD_LOG S9."""
    failure = await refusal(server, sampling=sampling)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == (f"input.sampling_params.{field}",)


@pytest.mark.parametrize(
    ("structured", "field"),
    [
        (StructuredOutputsParams(json=""), "json"),
        (StructuredOutputsParams(regex=""), "regex"),
        (StructuredOutputsParams(choice=Choice()), "choice.choices"),
        (StructuredOutputsParams(grammar=""), "grammar"),
        (StructuredOutputsParams(structural_tag=""), "structural_tag"),
    ],
)
async def test_an_empty_constraint(vllm_config: VllmConfig, structured: StructuredOutputsParams, field: str) -> None:
    async with FakeEngineServer.run(vllm_config, keep_tokenizer=True) as server:
        failure = await refusal(server, sampling={"structured_outputs": structured})
    assert failure.fields == (f"input.sampling_params.structured_outputs.{field}",)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"structured_outputs": REGEX}}, "sampling_params.structured_outputs"),
        ({"reasoning_ended": True}, "reasoning_ended"),
        ({"reasoning_parser_kwargs_json": "{}"}, "reasoning_parser_kwargs_json"),
    ],
)
async def test_what_needs_the_tokenizer_says_which_option_loads_it(
    server: FakeEngineServer, fields: dict[str, Any], field: str
) -> None:
    """FIELD_LOG S3."""
    failure = await refusal(server, **fields)
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_REQUIRED")
    assert failure.fields == (f"input.{field}",)
    assert "--keep-tokenizer" in failure.message


async def test_an_unknown_model_is_not_found(server: FakeEngineServer) -> None:
    failure = await refusal(server, model="other")
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
    assert failure.fields == ("input.model",)
    assert server.engine.limits.served_model_names[0] in failure.message


@pytest.mark.parametrize("fields", [{"model": "x" * 100_000}, {"model": "é" * 100_000}])
async def test_a_refusal_is_short_enough_for_grpc_whatever_it_quotes(
    server: FakeEngineServer, fields: dict[str, Any]
) -> None:
    assert (await refusal(server, **fields)).reason == "UNKNOWN_MODEL"


async def test_a_duplicate_json_key_is_quoted_in_short(server: FakeEngineServer) -> None:
    key = "k" * 100_000
    failure = await refusal(server, kv_transfer_params_json=f'{{"{key}": 1, "{key}": 2}}')
    assert failure.reason == "INVALID_FIELD"


@pytest.mark.parametrize("request_type", [pb.GenerateRequest, pb.GenerateStreamRequest])
async def test_a_request_without_input(server: FakeEngineServer, request_type: Any) -> None:
    if request_type is pb.GenerateRequest:
        failure = await failure_of(server.stub.Generate(request_type()))
    else:
        failure = await failure_of(collect(server.stub.GenerateStream(request_type())))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == ("input",)


@pytest.mark.parametrize(
    ("request_ids", "remember", "field"),
    [
        ([], None, "request_ids"),
        (["a", ""], None, "request_ids[1]"),
        (["a b"], None, "request_ids[0]"),
        (["a"] * 10_001, None, "request_ids"),
        (["a"], Duration(), "remember_unknown_for"),
        (["a"], Duration(seconds=-1), "remember_unknown_for"),
        (["a"], Duration(seconds=3600, nanos=1), "remember_unknown_for"),
    ],
)
async def test_a_bad_abort(
    server: FakeEngineServer, request_ids: list[str], remember: Duration | None, field: str
) -> None:
    """FIELD_LOG 32."""
    request = pb.AbortRequest(request_ids=request_ids, remember_unknown_for=remember)
    failure = await failure_of(server.stub.Abort(request))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == (field,)


async def test_numbers_in_a_message_are_written_out(server: FakeEngineServer) -> None:
    failure = await refusal(server, sampling={"max_tokens": 0})
    assert failure.message == "input.sampling_params.max_tokens: must be in [1, 4294967295], got 0"


# The fuzz: any message at all.

_doubles = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-2, 2)
_ids = st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([VOCAB_SIZE, 2**31, 2**32 - 1])
_counts = st.integers(0, 12) | st.integers(0, 2**32 - 1)
_signed = st.integers(-2, 12) | st.integers(-(2**31), 2**31 - 1)
_token_ids = st.builds(TokenIds, token_ids=st.lists(_ids, max_size=4))
_json = st.sampled_from(
    ["{}", '{"a": [1, {"b": null}]}', "[]", "", '{"a": 1e999}', '{"a": 1, "a": 2}', DEEP]
) | st.text(max_size=20)
_structured = st.builds(StructuredOutputsParams, regex=st.text(max_size=5)) | st.builds(StructuredOutputsParams)
_repetition = st.builds(
    RepetitionDetectionParams, max_pattern_size=_counts, min_pattern_size=_counts, min_count=_counts
)

SAMPLING_VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("n", "max_tokens", "min_tokens", "stream_interval"), _counts),
    **dict.fromkeys(("prompt_logprob_start", "routed_experts_prompt_start"), _counts),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _doubles),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _doubles),
    **dict.fromkeys(("top_k", "logprobs", "prompt_logprobs", "thinking_token_budget"), _signed),
    **dict.fromkeys(("ignore_eos", "skip_reading_prefix_cache", "watermarking"), st.booleans()),
    **dict.fromkeys(("logprob_token_ids", "allowed_token_ids", "trace_decode_token_ids"), _token_ids),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop_token_ids": st.lists(_ids, max_size=4),
    "logit_bias": st.dictionaries(_ids, _doubles, max_size=3),
    "prompt_logprob_token_ids": st.builds(TokenIdRows, rows=st.lists(_token_ids, max_size=4)),
    "bad_words_token_ids": st.lists(_token_ids, max_size=3),
    "structured_outputs": _structured,
    "repetition_detection": _repetition,
    "extra_args_json": _json,
}
INPUT_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.text(max_size=8),
    "prompt_token_ids": st.lists(_ids, max_size=MAX_MODEL_LEN + 2),
    "sampling_params": st.fixed_dictionaries({}, optional=SAMPLING_VALUES).map(lambda v: SamplingParams(**v)),
    "model": st.text(max_size=8),
    "priority": st.integers(-(2**63), 2**63 - 1),
    "cache_salt": st.text(max_size=8),
    "data_parallel_rank": _counts,
    "session_id": st.text(max_size=8),
    "max_time": st.builds(
        Duration, seconds=st.integers(-1, 2) | st.integers(10, 2**63 - 1), nanos=st.integers(-(2**31), 2**31 - 1)
    ),
    "trace_headers": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
    "reasoning_ended": st.booleans(),
    "return_prompt_token_ids": st.booleans(),
    **dict.fromkeys(
        ("kv_transfer_params_json", "ec_transfer_params_json", "kv_hints_json", "reasoning_parser_kwargs_json"), _json
    ),
}


def test_the_fuzz_knows_every_field() -> None:
    assert set(SAMPLING_VALUES) == set(SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(INPUT_VALUES) == set(GenerationInput.DESCRIPTOR.fields_by_name)


def test_no_message_at_all_hurts_the_server(vllm_config: VllmConfig) -> None:
    good = {"prompt_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)}
    # Few fields at a time, so that not every message is refused for its first one.
    few = st.sets(st.sampled_from(sorted({*SAMPLING_VALUES})), max_size=3).flatmap(
        lambda names: st.fixed_dictionaries({name: SAMPLING_VALUES[name] for name in names})
    )
    focused = st.builds(
        lambda prompt, sampling: GenerationInput(prompt_token_ids=prompt, sampling_params=SamplingParams(**sampling)),
        good["prompt_token_ids"],
        few,
    )
    anything = st.fixed_dictionaries({}, optional=INPUT_VALUES).map(lambda values: GenerationInput(**values))
    with asyncio.Runner() as runner:
        running = FakeEngineServer.run(vllm_config)
        server = runner.run(running.__aenter__())
        server.core.answer = [5]

        @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(focused | anything)
        def send(message: GenerationInput) -> None:
            runner.run(check(server, message))

        send()
        runner.run(running.__aexit__(None, None, None))


async def check(server: FakeEngineServer, message: GenerationInput) -> None:
    try:
        await within(server.stub.Generate(pb.GenerateRequest(input=message)))
    except grpc.aio.AioRpcError as error:
        failure = Failure.of(error)
        refusals = {
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.FAILED_PRECONDITION,
        }
        assert failure.code in refusals, failure
        assert failure.fields, failure
