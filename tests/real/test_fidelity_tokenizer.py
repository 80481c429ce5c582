"""A server with the tokenizer and an adapter: grammars, and LoRA by the model's name."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import jsonschema
import pytest
import torch
from safetensors.torch import save_file

from harness import ServerProcess, run
from tokenwire import (
    AsyncClient,
    FinishReason,
    InvalidArgumentError,
    NotFoundError,
    Reason,
    SamplingParams,
    StructuredOutputsParams,
    UnimplementedError,
)
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2, multiplex_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

# The first test pays for the start of the server, or of an engine of vLLM alone.
pytestmark = pytest.mark.timeout(400)

LAYERS = 30
HIDDEN = 576
KEYS_AND_VALUES = 192
RANK = 4
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "logprobs": 2}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter for the demo model, of random weights."""
    folder = tmp_path_factory.mktemp("adapter")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(LAYERS):
        for module, size in (("q_proj", HIDDEN), ("v_proj", KEYS_AND_VALUES)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=random) * 0.05
            weights[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=random) * 0.05
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def reference(
    server: ServerProcess,  # noqa: ARG001  # it starts meanwhile
    arguments: list[str],
    adapter: str,
    prompt: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What AsyncLLM in process answers with the adapter and without."""
    request = {"prompt": prompt, "params": GREEDY}
    job = {
        "engine_arguments": ["--model", *arguments, "--enable-lora"],
        "requests": {"tiny": request | {"adapter": adapter}, "base": request},
    }
    folder: Path = tmp_path_factory.mktemp("reference")
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("reference.py")
    finished = run([sys.executable, script, folder / "job.json", folder / "answers.json"], timeout=250)
    assert finished.exit_code == 0, finished.stderr
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


@pytest.fixture(scope="module")
def server(arguments: list[str], adapter: str) -> Iterator[ServerProcess]:
    names = ["--served-model-name", "demo", "alias"]
    command = [*arguments, "--keep-tokenizer", *names, "--lora-modules", f"tiny={adapter}"]
    with ServerProcess(command, wait=False, ready_timeout=250) as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess, reference: dict[str, Any]) -> AsyncIterator[AsyncClient]:
    # The server has started while the reference was made.
    assert reference
    if not server.address:
        server.wait_ready()
    async with AsyncClient(server.address) as client:
        yield client


# LoRA


@pytest.mark.parametrize(
    ("model_name", "which"), [("tiny", "tiny"), (None, "base"), ("demo", "base"), ("alias", "base")]
)
async def test_a_name_decides_whose_tokens_come(
    client: AsyncClient, prompt: list[int], reference: dict[str, Any], model_name: str | None, which: str
) -> None:
    assert reference["tiny"]["token_ids"] != reference["base"]["token_ids"]
    [output] = (await client.generate(prompt, SamplingParams(**GREEDY), model=model_name)).outputs
    assert output.token_ids == reference[which]["token_ids"]
    assert output.logprobs is not None
    assert output.logprobs.logprobs == pytest.approx(reference[which]["logprobs"], rel=1e-6)


async def test_the_folder_too_names_the_base_model(client: AsyncClient, prompt: list[int], model: str) -> None:
    base, named = [
        await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2), model=name)
        for name in (None, model)
    ]
    assert named.token_ids == base.token_ids


async def test_another_name_is_not_found(client: AsyncClient, prompt: list[int]) -> None:
    with pytest.raises(NotFoundError) as caught:
        await client.generate(prompt, SamplingParams(max_tokens=1), model="huge")
    assert caught.value.reason == Reason.UNKNOWN_MODEL
    assert "demo, alias" in caught.value.message
    assert "tiny" in caught.value.message


async def test_prompt_logprobs_do_not_end_the_engine(client: AsyncClient, prompt: list[int]) -> None:
    """With LoRA on, vLLM's CPU engine dies of them: they are refused, whoever asks."""
    for name in (None, "tiny"):
        with pytest.raises(UnimplementedError) as caught:
            await client.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), model=name)
        assert caught.value.field_violations[0].field == "input.sampling_params.prompt_logprobs"
    assert len((await client.generate(prompt, SamplingParams(max_tokens=1))).token_ids) == 1


async def test_engine_info_tells_the_names(client: AsyncClient, adapter: str, model: str) -> None:
    info = await client.engine_info()
    assert info.served_model_names == ("demo", "alias", model)
    assert [(one.name, one.path) for one in info.adapters] == [("tiny", adapter)]
    assert {"lora", "structured_outputs"} <= set(info.features)
    assert info.eos_token_ids == (2,)


# Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "members": {"type": "integer", "minimum": 0, "maximum": 99},
        "open": {"type": "boolean"},
    },
    "required": ["name", "members", "open"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def no_space(tokenizer: Any) -> dict[int, float]:
    """A bias against white space, of which a small model writes no end where the grammar allows it."""
    return dict.fromkeys((token for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()), -100.0)


def constrained(fields: dict[str, Any], **sampling: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**fields)
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60} | sampling, structured_outputs=structured)


def assert_follows_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "sampling",
    # Several sequences, or a larger interval, take vLLM's ordinary path.
    [{}, {"logprobs": 1}, {"stream_interval": 3}, {"n": 2, "temperature": 0.7, "seed": 3}],
    ids=["direct path", "with logprobs", "ordinary path", "two sequences"],
)
async def test_a_json_schema_yields_json_that_validates(
    client: AsyncClient, prompt: list[int], tokenizer: Any, no_space: dict[int, float], sampling: dict[str, Any]
) -> None:
    params = constrained({"json": json.dumps(SCHEMA)}, logit_bias=no_space, **sampling)

    async def streamed() -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        async with client.stream(prompt, params) as stream:
            async for delta in stream:
                for output in delta.outputs:
                    tokens.setdefault(output.index, []).extend(output.token_ids)
        return tokens

    result, tokens = await asyncio.gather(client.generate(prompt, params), streamed())
    assert len(result.outputs) == len(tokens) == sampling.get("n", 1)
    for output in result.outputs:
        assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, None)
        assert_follows_schema(tokenizer.decode(output.token_ids, skip_special_tokens=True))
    for ids in tokens.values():
        assert_follows_schema(tokenizer.decode(ids, skip_special_tokens=True))


async def test_a_json_schema_on_a_multiplex_stream(
    client: AsyncClient, prompt: list[int], tokenizer: Any, no_space: dict[int, float]
) -> None:
    params = constrained({"json": json.dumps(SCHEMA)}, logit_bias=no_space).to_proto()
    message = generation_pb2.GenerationInput(prompt_token_ids=prompt, sampling_params=params)
    async with grpc.aio.insecure_channel(client.target) as channel:
        call = EngineServiceStub(channel).Multiplex()
        await call.write(pb.MultiplexRequest(submit=multiplex_pb2.MultiplexSubmit(handle=1, input=message)))
        await call.done_writing()
        tokens = [token async for response in call for token in response.step.token_ids]
    assert_follows_schema(tokenizer.decode(tokens, skip_special_tokens=True))


OLD_TAG = {
    "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
    "triggers": ["<n>"],
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"},
}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,6}, [0-9]{3}"}, r"[A-Z][a-z]{2,6}, [0-9]{3}"),
        ({"choice": ["twenty-seven", "ninety"]}, "twenty-seven|ninety"),
        ({"grammar": 'root ::= "yes " num\nnum ::= [1-9] [0-9]?'}, "yes [1-9][0-9]?"),
        ({"structural_tag": json.dumps(TAG)}, "<n>[0-9]{2}</n>"),
        ({"structural_tag": json.dumps(OLD_TAG)}, "(?s).*"),
    ],
    ids=["regex", "choice", "grammar", "structural_tag", "structural_tag, old form"],
)
async def test_an_output_follows_its_grammar(
    client: AsyncClient, prompt: list[int], tokenizer: Any, fields: dict[str, Any], pattern: str
) -> None:
    result = await client.generate(prompt, constrained(fields, max_tokens=24))
    assert re.fullmatch(pattern, tokenizer.decode(result.token_ids, skip_special_tokens=True))


async def test_any_json_object(client: AsyncClient, prompt: list[int], tokenizer: Any) -> None:
    params = constrained({"json_object": True}, max_tokens=24)
    result = await client.generate(prompt, params)
    assert isinstance(json.loads(tokenizer.decode(result.token_ids, skip_special_tokens=True)), dict)


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"json": '{"type": "nope"}'}, "json", "Invalid type: nope"),
        ({"json": "{"}, "json", "not valid JSON"),
        ({"regex": "("}, "regex", "unclosed group"),
        ({"grammar": "root ::= other"}, "grammar", "other"),
        ({"structural_tag": "{}"}, "structural_tag", "triggers"),
    ],
    ids=["schema", "json", "regex", "grammar", "structural_tag"],
)
async def test_a_bad_grammar_is_refused_in_its_parsers_words(
    client: AsyncClient, prompt: list[int], fields: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate(prompt, constrained(fields))
    assert [violation.field for violation in caught.value.field_violations] == [
        f"input.sampling_params.structured_outputs.{field}"
    ]
    assert text in caught.value.message
    assert len((await client.generate(prompt, SamplingParams(max_tokens=1))).token_ids) == 1
