"""A request that cannot be served is refused with the field at fault, and the engine serves the next one."""

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig

from fake_engine import Failure, FakeEngineServer, collect, failure_of, make_config
from fake_engine.core import MAX_MODEL_LEN, MAX_NUM_SEQS, VOCAB_SIZE
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.sampling_params_pb2 import (
    Choice,
    RepetitionDetectionParams,
    StructuredOutputsParams,
    TokenIdRows,
    TokenIds,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

OUT_OF_VOCAB = TokenIds(token_ids=[1, VOCAB_SIZE])
DEEP = '{"a":' * 2000 + "1" + "}" * 2000
BIG = '{"a": "' + "x" * 2**20 + '"}'
BIG_IN_BYTES = '{"a": "' + "é" * 2**19 + '"}'
REGEX = StructuredOutputsParams(regex="a")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    """One server for all cells: what one of them left behind would show in the next."""
    async with FakeEngineServer.run(vllm_config) as running:
        yield running


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
    ({"cache_salt": "x" * 129}, "cache_salt"),
    *[({"cache_salt": f"a{character}b"}, "cache_salt") for character in "@/\\\0"],
    ({"model": "x" * 1025}, "model"),
    ({"session_id": "x" * 1025}, "session_id"),
    ({"trace_headers": {f"h{i}": "" for i in range(65)}}, "trace_headers"),
    ({"trace_headers": {"a": "x" * 4096, "b": "x" * 4095}}, "trace_headers"),
    ({"trace_headers": {"a": "é" * 4096}}, "trace_headers"),
    ({"data_parallel_rank": 1}, "data_parallel_rank"),
    ({"max_time": Duration()}, "max_time"),
    ({"max_time": Duration(seconds=-1)}, "max_time"),
    ({"max_time": Duration(seconds=-2, nanos=2**31 - 1)}, "max_time"),
    ({"max_time": Duration(seconds=2, nanos=-1)}, "max_time"),
    ({"max_time": Duration(nanos=10**9)}, "max_time"),
    ({"max_time": Duration(seconds=315_576_000_001)}, "max_time"),
    ({"kv_hints_json": '{"protocol_version": 1}'}, "kv_hints_json"),
    ({"kv_hints_json": "[]"}, "kv_hints_json"),
    ({"kv_hints_json": BIG}, "kv_hints_json"),
]

BAD_TRANSFER: list[tuple[dict[str, Any], str]] = [
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
    (
        {"kv_transfer_params_json": "{}", "sampling": {"extra_args_json": '{"kv_transfer_params": {}}'}},
        "kv_transfer_params_json",
    ),
    ({"kv_transfer_params_json": BIG}, "kv_transfer_params_json"),
    ({"kv_transfer_params_json": BIG_IN_BYTES}, "kv_transfer_params_json"),
    ({"ec_transfer_params_json": BIG}, "ec_transfer_params_json"),
]

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": MAX_NUM_SEQS + 1}, "n"),
    ({"n": 2**32 - 1}, "n"),
    ({"n": 2, "temperature": 0.0}, "n"),
    # Sequence i has the seed `seed + i`; -1 is none, and there is none above int64.
    ({"n": 2, "seed": -2}, "seed"),
    ({"n": 3, "seed": -3}, "seed"),
    ({"n": 2, "seed": 2**63 - 1}, "seed"),
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
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    # With the model's EOS.
    ({"stop_token_ids": range(3, 131), "min_tokens": 1}, "stop_token_ids"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias[{VOCAB_SIZE}]"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"allowed_token_ids": OUT_OF_VOCAB}, "allowed_token_ids.token_ids[1]"),
    ({"allowed_token_ids": TokenIds()}, "allowed_token_ids.token_ids"),
    ({"allowed_token_ids": TokenIds(token_ids=[1] * 1025)}, "allowed_token_ids.token_ids"),
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
    ({"logprob_token_ids": TokenIds(token_ids=range(129))}, "logprob_token_ids.token_ids"),
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
    (
        {"prompt_logprob_token_ids": TokenIdRows(rows=[TokenIds(token_ids=[1] * 21)])},
        "prompt_logprob_token_ids.rows[0].token_ids",
    ),
    (
        {"prompt_logprob_token_ids": TokenIdRows(rows=[TokenIds(token_ids=[1])] * MAX_MODEL_LEN)},
        "prompt_logprob_token_ids.rows",
    ),
    ({"prompt_logprob_start": 0}, "prompt_logprob_start"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"trace_decode_token_ids": TokenIds(token_ids=[1] * (MAX_MODEL_LEN + 1))}, "trace_decode_token_ids.token_ids"),
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
    ({"extra_args_json": BIG}, "extra_args_json"),
    ({"structured_outputs": StructuredOutputsParams()}, "structured_outputs.constraint"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_INPUTS, ids=lambda value: str(value)[:60])
async def test_a_bad_field_of_the_input(server: FakeEngineServer, fields: dict[str, Any], field: str) -> None:
    """FIELD_LOG 48, S1; FAULTS B10, C4, C12, C21."""
    failure = await refusal(server, **fields)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == (f"input.{field}",)


@pytest.mark.parametrize(("sampling", "field"), BAD_SAMPLING, ids=lambda value: str(value)[:60])
async def test_a_bad_sampling_field(server: FakeEngineServer, sampling: dict[str, Any], field: str) -> None:
    """FIELD_LOG S9; FAULTS B5, B7, B11, C4, C21."""
    failure = await refusal(server, sampling=sampling)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == (f"input.sampling_params.{field}",)


@pytest.fixture(scope="module")
def transfer_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return make_config(
        tmp_path_factory.mktemp("model"),
        kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        ec_transfer_config=ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both"),
    )


@pytest.mark.parametrize(("fields", "field"), BAD_TRANSFER, ids=lambda value: str(value)[:60])
async def test_bad_transfer_parameters(transfer_config: VllmConfig, fields: dict[str, Any], field: str) -> None:
    """FIELD_LOG 48; FAULTS C4."""
    async with FakeEngineServer.run(transfer_config) as server:
        failure = await refusal(server, **fields)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == (f"input.{field}",)


@pytest.mark.parametrize("field", ["kv_transfer_params_json", "ec_transfer_params_json"])
@pytest.mark.parametrize("text", ["{}", "{", BIG], ids=["right", "not JSON", "too long"])
async def test_transfer_parameters_need_a_connector(server: FakeEngineServer, field: str, text: str) -> None:
    """FAULTS C14. What the text is does not matter: it is not parsed."""
    failure = await refusal(server, **{field: text})
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD")
    assert failure.fields == (f"input.{field}",)
    assert "connector" in failure.message


@pytest.mark.parametrize(
    ("structured", "field"),
    [(StructuredOutputsParams(json=BIG), "json"), (StructuredOutputsParams(structural_tag=BIG), "structural_tag")],
    ids=["json", "structural_tag"],
)
async def test_a_schema_is_bounded(vllm_config: VllmConfig, structured: StructuredOutputsParams, field: str) -> None:
    """FAULTS C4."""
    async with FakeEngineServer.run(vllm_config, keep_tokenizer=True) as server:
        failure = await refusal(server, sampling={"structured_outputs": structured})
        assert failure.fields == (f"input.sampling_params.structured_outputs.{field}",)
        assert (await refusal(server, reasoning_parser_kwargs_json=BIG)).fields == (
            "input.reasoning_parser_kwargs_json",
        )


@pytest.mark.parametrize(
    "sampling",
    [
        {"prompt_logprobs": 1},
        {"prompt_logprob_token_ids": TokenIdRows(rows=[TokenIds(token_ids=[1])] * 2)},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
async def test_prompt_logprobs_need_a_prompt_that_is_computed(
    server: FakeEngineServer, sampling: dict[str, Any]
) -> None:
    """FAULTS B1: from the prefix cache they are uninitialized memory, and vLLM's own server dies of it."""
    failure = await refusal(server, sampling={**sampling, "skip_reading_prefix_cache": False})
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    names = (*sampling, "skip_reading_prefix_cache")
    assert failure.fields == tuple(f"input.sampling_params.{name}" for name in names)
    assert all(name in failure.message for name in names)


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


@pytest.mark.parametrize("name", ["x" * 1024, "é" * 1024])
async def test_an_unknown_model_is_quoted_in_short(server: FakeEngineServer, name: str) -> None:
    """FAULTS C12."""
    failure = await refusal(server, model=name)
    assert failure.reason == "UNKNOWN_MODEL"
    assert name[:200] in failure.message
    assert name[:201] not in failure.message


async def test_a_duplicate_json_key_is_quoted_in_short(server: FakeEngineServer) -> None:
    """FAULTS C12."""
    key = "k" * 100_000
    failure = await refusal(server, sampling={"extra_args_json": f'{{"{key}": 1, "{key}": 2}}'})
    assert failure.reason == "INVALID_FIELD"
    assert key[:200] in failure.message
    assert key[:201] not in failure.message


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
        (["a"], Duration(seconds=-2, nanos=2**31 - 1), "remember_unknown_for"),
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
