"""Structured outputs of a server with the tokenizer: what vLLM's own parsers say of them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, failure_of, make_config, within
from tokenwire.v1.sampling_params_pb2 import Choice, JsonObject, SamplingParams, StructuredOutputsParams


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return make_config(folder, skip_tokenizer_init=False)


@pytest.fixture
async def server(config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(config, keep_tokenizer=True) as running:
        yield running


OLD_TAG = '{"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a"]}'
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}'


@pytest.mark.parametrize(
    "fields",
    [
        {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
        # What only the second parser takes.
        {"json": '{"type": "integer", "multipleOf": 3}'},
        {"json": "{}", "disable_any_whitespace": False, "disable_additional_properties": False},
        {"json_object": JsonObject()},
        {"regex": "[ab]{2,5}"},
        {"choice": Choice(choices=["yes", 'say "no"', "a\nb\\"])},
        {"grammar": 'root ::= "a" | "b"'},
        {"structural_tag": OLD_TAG},
        {"structural_tag": TAG},
    ],
    ids=str,
)
async def test_a_grammar_reaches_the_engine(server: FakeEngineServer, fields: dict[str, Any]) -> None:
    structured = StructuredOutputsParams(**fields)
    call = server.generate(sampling=SamplingParams(structured_outputs=structured))
    request = await server.core.next_request()
    found = request.params.structured_outputs
    match structured.WhichOneof("constraint"):
        case "json_object":
            assert found.json_object is True
        case "choice":  # which vLLM writes as a grammar
            assert found.grammar == r'root ::= "yes" | "say \"no\"" | "a\nb\\"'
        case kind:
            assert kind is not None
            assert getattr(found, kind) == fields[kind]
    request.step(5, finish="stop")
    await within(call)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"json": "{"}, "Expecting property name"),
        ({"json": "[]"}, "must be a JSON object"),
        ({"json": '{"type": "nope"}'}, "Invalid type: nope"),
        ({"json": '{"$ref": "#/absent"}'}, "Pointer '/absent' does not exist"),
        ({"json": '{"type": "string", "pattern": "("}'}, "unclosed group"),
        ({"json": '{"a":' * 100 + "{}" + "}" * 100}, "nested too deeply"),
        ({"json": '{"a":' * 100_000 + "{}" + "}" * 100_000}, "recursion"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "\0"}, "NUL"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"grammar": 'root ::= "a'}, "Unexpected end of input"),
        ({"grammar": "root ::= other"}, "Rule 'other' not found"),
        ({"structural_tag": "{"}, "Expecting property name"),
        ({"structural_tag": "{}"}, "triggers"),
        ({"structural_tag": OLD_TAG.replace('"<a"', '"<b"')}, "not found in triggers"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_a_bad_grammar_says_what_its_parser_says(
    server: FakeEngineServer, fields: dict[str, Any], text: str
) -> None:
    [kind] = fields
    failure = await failure_of(server.generate(sampling={"structured_outputs": StructuredOutputsParams(**fields)}))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == (f"input.sampling_params.structured_outputs.{kind}",)
    assert text in failure.message
    await server.check_alive()


@pytest.mark.parametrize(
    ("option", "value"),
    [("disable_any_whitespace", True), ("disable_additional_properties", True), ("whitespace_pattern", " ?")],
)
async def test_an_option_that_vllm_would_ignore_is_refused(server: FakeEngineServer, option: str, value: Any) -> None:
    structured = StructuredOutputsParams(json="{}", **{option: value})
    failure = await failure_of(server.generate(sampling={"structured_outputs": structured}))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD")
    assert failure.fields == (f"input.sampling_params.structured_outputs.{option}",)


async def test_with_the_tokenizer_eos_is_its_own(server: FakeEngineServer) -> None:
    call = server.generate()
    request = await server.core.next_request()
    assert (request.params.eos_token_id, request.params.stop_token_ids) == (2, [])
    request.step(2, finish="stop")
    response = await within(call)
    assert not response.outputs[0].HasField("stop_token_id")
