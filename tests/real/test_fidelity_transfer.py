"""A prefill engine hands a prompt's KV cache to a decode engine, through our API; and a model without EOS in its defaults.

vLLM's ExampleConnector keeps the cache in a folder that both engines share. The decode engine's model folder names no
EOS in generation_config.json, so that one engine serves both subjects.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import ServerProcess
from tokenwire import AsyncClient, FinishReason, InvalidArgumentError, SamplingParams

# The first test pays for the starts.
pytestmark = pytest.mark.timeout(400)

BLOCK = 128
"""Tokens in a block of the KV cache: vLLM's own choice on the CPU."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    extra = {"shared_storage_path": str(tmp_path_factory.mktemp("kv"))}
    config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(config)]


@pytest.fixture(scope="module")
def model_without_eos(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model with a generation_config.json that has no eos_token_id."""
    folder = tmp_path_factory.mktemp("model")
    for file in Path(model).iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((Path(model) / "generation_config.json").read_text())
    del config["eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def long_prompt(prompt: list[int]) -> list[int]:
    return (prompt * 12)[:400]


@pytest.fixture(scope="module")
def decode_server(
    arguments: list[str], connector: list[str], model_without_eos: str, long_prompt: list[int]
) -> Iterator[ServerProcess]:
    """The decode engine, once the prefill engine has done its part and has ended."""

    async def prefill(address: str) -> str | None:
        async with AsyncClient(address) as client:
            result = await client.generate(
                long_prompt,
                SamplingParams(temperature=0.0, max_tokens=1),
                kv_transfer_params_json='{"do_remote_decode": true}',
            )
            assert result.usage.cached_tokens == 0
            return result.kv_transfer_params_json

    _model, *options = arguments
    with ServerProcess([model_without_eos, *options, *connector], wait=False, ready_timeout=250) as decode_server:
        with ServerProcess([*arguments, *connector], ready_timeout=250) as prefill_server:
            # ExampleConnector needs no parameters, and gives none back.
            assert asyncio.run(prefill(prefill_server.address)) is None
        decode_server.wait_ready()
        yield decode_server


@pytest.fixture
async def decode(decode_server: ServerProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(decode_server.address) as client:
        yield client


async def test_the_decode_engine_goes_on_where_the_prefill_engine_ended(
    decode: AsyncClient, client: AsyncClient, long_prompt: list[int]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    alone = await client.generate(long_prompt, params, cache_salt="alone")
    assert alone.usage.cached_tokens == 0
    handed = await decode.generate(long_prompt, params, kv_transfer_params_json='{"remote_port": 5600}')
    assert handed.token_ids == alone.token_ids
    assert handed.usage.prompt_tokens == 400
    assert handed.usage.cached_tokens == 400 // BLOCK * BLOCK


async def test_engine_info_names_the_connector(decode: AsyncClient) -> None:
    cache = (await decode.engine_info()).kv_cache
    assert (cache.kv_connector, cache.kv_role, cache.block_size) == ("ExampleConnector", "kv_both", BLOCK)


async def test_the_engine_is_told_of_a_prefill_that_will_not_be_fetched(decode: AsyncClient, prompt: list[int]) -> None:
    with pytest.raises(InvalidArgumentError):
        await decode.generate(prompt, SamplingParams(top_p=2.0), kv_transfer_params_json='{"do_remote_prefill": true}')
    # What comes only to be dropped does not disturb the engine.
    assert len((await decode.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))).token_ids) == 2


# EOS of a model whose generation_config.json names none


async def test_eos_is_reported_as_vllm_serve_reports_it(
    decode: AsyncClient, prompt: list[int], references: dict[str, Any]
) -> None:
    answer = references["eos"].answer
    [output] = (await decode.generate(prompt, GREEDY)).outputs
    assert output.token_ids == answer["token_ids"]
    assert output.token_ids[-1] == 2
    assert (output.finish_reason, output.stop_token_id) == (answer["finish_reason"], answer["stop_reason"])
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, None)
    assert (await decode.engine_info()).eos_token_ids == (2,)


async def test_ignore_eos(decode: AsyncClient, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=34, ignore_eos=True)
    result = await decode.generate(prompt, params)
    assert (len(result.token_ids), result.finish_reason) == (34, FinishReason.LENGTH)
    assert 2 in result.token_ids


async def test_min_tokens_keeps_eos_away(decode: AsyncClient, prompt: list[int], references: dict[str, Any]) -> None:
    natural = len(references["eos"].answer["token_ids"])
    params = SamplingParams(temperature=0.0, max_tokens=natural + 6, min_tokens=natural + 3)
    tokens = (await decode.generate(prompt, params)).token_ids
    assert len(tokens) >= natural + 3
    assert 2 not in tokens[: natural + 2]
