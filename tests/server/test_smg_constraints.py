"""Structured outputs of VllmEngine's requests, on a server with the tokenizer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, collect, failure_of, make_config, within
from harness.tokenizers import write_folder
from tokenwire_server.config import ServerConfig


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return make_config(write_folder(tmp_path_factory.mktemp("model")), skip_tokenizer_init=False)


@pytest.fixture
async def server(config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    settings = ServerConfig(port=0, smg=True)
    async with FakeEngineServer.run(config, server=settings, keep_tokenizer=True) as running:
        yield running


def generate(server: FakeEngineServer, **constraint: Any) -> Any:
    request = smg.GenerateRequest(tokenized={"input_ids": [1, 2, 3]}, sampling_params=constraint)
    return VllmEngineStub(server.channel).Generate(request)


@pytest.mark.parametrize(
    ("constraint", "name", "value"),
    [
        ({"json_schema": '{"type": "object"}'}, "json", '{"type": "object"}'),
        ({"regex": "[ab]+"}, "regex", "[ab]+"),
        ({"grammar": 'root ::= "a" | "b"'}, "grammar", 'root ::= "a" | "b"'),
        ({"json_object": True}, "json_object", True),
        # Which vLLM writes as a grammar.
        ({"choice": {"choices": ["yes", "no"]}}, "grammar", 'root ::= "yes" | "no"'),
    ],
    ids=str,
)
async def test_a_constraint_reaches_the_engine(
    server: FakeEngineServer, constraint: dict[str, Any], name: str, value: Any
) -> None:
    answer = asyncio.ensure_future(collect(generate(server, **constraint)))
    request = await server.core.next_request()
    assert getattr(request.params.structured_outputs, name) == value
    request.step(5, finish="stop")
    await within(answer)


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({"json_schema": "["}, "sampling_params.json_schema"),
        ({"json_schema": ""}, "sampling_params.json_schema"),
        ({"regex": "("}, "sampling_params.regex"),
        ({"grammar": "root ::= other"}, "sampling_params.grammar"),
        ({"choice": {}}, "sampling_params.choice.choices"),
    ],
    ids=str,
)
async def test_a_bad_constraint_is_named_as_it_was_sent(
    server: FakeEngineServer, constraint: dict[str, Any], field: str
) -> None:
    failure = await failure_of(generate(server, **constraint).read())
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))
    assert failure.message.startswith(f"{field}: ")
    assert server.core.idle


async def test_whether_the_reasoning_has_ended(server: FakeEngineServer) -> None:
    for first_token in (False, True):
        call = generate(server, regex="a", grammar_from_first_token=first_token)
        answer = asyncio.ensure_future(collect(call))
        request = await server.core.next_request()
        assert request.request.reasoning_ended is (True if first_token else None)
        request.step(5, finish="stop")
        await within(answer)
