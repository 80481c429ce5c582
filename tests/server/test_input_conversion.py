"""What of a GenerationInput arrives in the engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from fake_engine import FakeEngineServer, make_config, read, within
from tokenwire.v1.generation_pb2 import GenerationInput

ADAPTER = LoRARequest("german", 1, "/adapters/german")
HINTS = {
    "protocol_version": "1",
    "message_id": "m",
    "actions": [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"n": 5600}}],
}

ARRIVES: list[tuple[str, Any, str, Any]] = [
    ("request_id", "a.b/c:1~", "external_req_id", "a.b/c:1~"),
    ("prompt_token_ids", [5, 0, 999, 5], "prompt_token_ids", [5, 0, 999, 5]),
    ("model", "german", "lora_request", ADAPTER),
    ("model", "base", "lora_request", None),
    ("priority", -3, "priority", -3),
    ("priority", 0, "priority", 0),
    ("cache_salt", "tenant é", "cache_salt", "tenant é"),
    ("cache_salt", "x" * 128, "cache_salt", "x" * 128),
    ("data_parallel_rank", 0, "data_parallel_rank", 0),
    ("session_id", "s", "session_id", "s"),
    ("session_id", "s" * 1024, "session_id", "s" * 1024),
    (
        "kv_hints_json",
        json.dumps(HINTS),
        "kv_hints",
        KvHintsEnvelope("1", "m", [KvHintAction("a", "pin", "1", {"n": 5600})]),
    ),
    ("reasoning_ended", False, "reasoning_ended", False),
    ("reasoning_ended", True, "reasoning_ended", True),
    ("reasoning_parser_kwargs_json", '{"a": 1}', "reasoning_parser_kwargs", {"a": 1}),
]

# The field, and the test that covers it.
ELSEWHERE = {
    "sampling_params": "test_sampling_conversion",
    "max_time": "test_time_limit",
    "trace_headers": "below",
    "kv_transfer_params_json": "below",
    "ec_transfer_params_json": "below",
    "return_prompt_token_ids": "test_output_conversion",
}


async def sent(server: FakeEngineServer, **fields: Any) -> EngineCoreRequest:
    prompt = fields.pop("prompt_token_ids", [1, 2, 3])
    call = server.generate(prompt, **fields)
    request = await server.core.next_request()
    request.step(5, finish="length")
    await within(call)
    return request.request


@pytest.fixture(scope="module")
def every_feature(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(
        tmp_path_factory.mktemp("model"), enable_lora=True, scheduling_policy="priority", served_model_name="base"
    )


@pytest.mark.parametrize(("field", "value", "name", "expected"), ARRIVES)
async def test_a_field_arrives(every_feature: Any, field: str, value: Any, name: str, expected: Any) -> None:
    """FIELD_LOG 48."""
    async with FakeEngineServer.run(every_feature, keep_tokenizer=True, adapters=[ADAPTER]) as server:
        assert getattr(await sent(server, **{field: value}), name) == expected


def test_every_field_of_the_contract_is_tested() -> None:
    assert set(GenerationInput.DESCRIPTOR.fields_by_name) == {row[0] for row in ARRIVES} | set(ELSEWHERE)


async def test_what_is_not_set_arrives_as_unset(server: FakeEngineServer) -> None:
    request = await sent(server)
    unset = ("cache_salt", "data_parallel_rank", "session_id", "lora_request", "kv_hints", "trace_headers")
    assert [getattr(request, name) for name in unset] == [None] * len(unset)
    assert (request.priority, request.reasoning_ended, request.reasoning_parser_kwargs) == (0, None, None)
    assert request.sampling_params.extra_args is None


async def test_transfer_parameters_arrive_beside_the_extra_arguments(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        ec_transfer_config=ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both"),
    )
    async with FakeEngineServer.run(config) as server:
        request = await sent(
            server,
            kv_transfer_params_json='{"remote_port": 5600, "x": 1e3}',
            ec_transfer_params_json="{}",
            sampling={"extra_args_json": '{"mine": true}'},
        )
    extra = request.sampling_params.extra_args
    assert extra == {"mine": True, "kv_transfer_params": {"remote_port": 5600, "x": 1000.0}, "ec_transfer_params": {}}
    assert type(extra["kv_transfer_params"]["remote_port"]) is int


async def test_trace_headers_reach_an_engine_that_traces(tmp_path: Path) -> None:
    # Not through AsyncLLM: it drops them unless a collector's address is configured, and then it connects to it.
    async with FakeEngineServer.run(make_config(tmp_path)) as server:
        message = GenerationInput(prompt_token_ids=[1], trace_headers={"traceparent": "00-a-b-01"})
        request = server.engine.convert(message, request_id="a", stream=False)
        assert request.trace_headers == {"traceparent": "00-a-b-01"}


async def test_an_id_is_made_up_where_none_is_given(server: FakeEngineServer) -> None:
    ids = {(await sent(server)).external_req_id for _ in range(3)}
    assert len(ids) == 3
    assert all(ids)


async def test_the_answer_names_the_id_that_was_made_up(server: FakeEngineServer) -> None:
    server.core.answer = [5]
    response = await within(server.generate())
    [message, *_] = [await read(server.stream())]
    assert response.request_id
    assert message.request_id
