"""LoRA adapters: from the command line into the engine, and what GetEngineInfo and requests make of their names."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from fake_engine import FakeEngineCore, FakeEngineServer, failure_of, make_config, make_llm, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire_server.engine.adapters import AdapterError
from tokenwire_server.engine.engine import Engine
from tokenwire_server.process.arguments import parse


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_none_is_the_default() -> None:
    arguments = parse(["some/model"])
    assert arguments.adapters == []
    assert not arguments.engine.enable_lora


def test_an_adapter_turns_lora_on(adapter: Path) -> None:
    arguments = parse(["some/model", "--lora-modules", f"german={adapter}", "hub=some/adapter", "--max-loras", "2"])
    assert arguments.engine.enable_lora
    assert arguments.engine.max_loras == 2
    assert [(one.lora_name, one.lora_int_id, one.lora_path) for one in arguments.adapters] == [
        ("german", 1, str(adapter)),
        ("hub", 2, "some/adapter"),
    ]


@pytest.mark.parametrize(("base", "expected"), [("alias", "alias"), ("other", None)])
def test_vllms_json_form(adapter: Path, base: str, expected: str | None) -> None:
    text = f'{{"name": "german", "path": "{adapter}", "base_model_name": "{base}"}}'
    [found] = parse(["some/model", "--served-model-name", "base", "alias", "--lora-modules", text]).adapters
    assert (found.lora_name, found.lora_path, found.base_model_name) == ("german", str(adapter), expected)


@pytest.mark.parametrize(
    ("modules", "fault"),
    [
        (["a=/no/such/folder"], "LoRA adapter 'a' (/no/such/folder): the folder does not exist"),
        (["a={empty}"], "LoRA adapter 'a' ({empty}): the folder contains no adapter_config.json"),
        (["a={good}", "a={good}"], "LoRA adapter 'a' ({good}): another adapter has this name"),
        (["alias={good}"], "LoRA adapter 'alias' ({good}): the base model has this name"),
        (["some/model={good}"], "LoRA adapter 'some/model' ({good}): the base model has this name"),
        (["a="], "LoRA adapter 'a' (): needs a name and a path"),
    ],
)
def test_one_that_cannot_work_is_one_line(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], modules: list[str], fault: str
) -> None:
    folders = {"good": adapter, "empty": tmp_path}
    argv = ["some/model", "--served-model-name", "base", "alias", "--lora-modules"]
    with pytest.raises(SystemExit) as caught:
        parse([*argv, *[module.format(**folders) for module in modules]])
    assert caught.value.code == 3
    assert capsys.readouterr().err == f"tokenwire: error: cannot load some/model: {fault.format(**folders)}\n"


@pytest.mark.parametrize("text", ["german", '{"name": "a"}', '{"name": "a", "path": "b", "rank": 1}'])
def test_one_that_cannot_be_read_is_one_line(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["some/model", "--lora-modules", text])
    assert caught.value.code == 2
    assert "--lora-modules" in capsys.readouterr().err


@pytest.fixture(scope="module")
def lora_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return make_config(tmp_path_factory.mktemp("model"), enable_lora=True, served_model_name=["base", "alias"])


ADAPTERS = [LoRARequest("german", 1, "/german"), LoRARequest("french", 2, "/french")]


async def test_all_are_loaded_at_the_start(lora_config: VllmConfig) -> None:
    core = FakeEngineCore()
    engine = Engine(await make_llm(lora_config, core), adapters=ADAPTERS)
    await engine.start()
    assert core.adapters == ADAPTERS
    engine.shutdown()


async def test_one_that_does_not_load_ends_the_engine(lora_config: VllmConfig) -> None:
    core = FakeEngineCore()
    core.refusal = Exception("rank 64 is greater\nTraceback")
    engine = Engine(await make_llm(lora_config, core), adapters=ADAPTERS)
    with pytest.raises(AdapterError) as caught:
        await engine.start()
    assert str(caught.value) == "LoRA adapter 'german' (/german): rank 64 is greater"
    assert core.was_shut_down


async def test_every_name_of_the_base_model_and_of_an_adapter(lora_config: VllmConfig) -> None:
    names = ["base", "alias"]
    async with FakeEngineServer.run(lora_config, adapters=ADAPTERS, served_model_names=names) as server:
        info = (await within(server.stub.GetEngineInfo(pb.GetEngineInfoRequest()))).info
        assert list(info.served_model_names) == [*names, info.model]
        assert [(adapter.name, adapter.path) for adapter in info.adapters] == [
            ("german", "/german"),
            ("french", "/french"),
        ]
        expected: dict[str, Any] = {**dict.fromkeys(info.served_model_names), "german": 1, "french": 2}
        for name, number in expected.items():
            call = server.generate(model=name)
            request = await server.core.next_request()
            found = request.request.lora_request
            assert (found and found.lora_int_id) == number
            request.step(5, finish="length")
            await within(call)
        failure = await failure_of(server.generate(model="german2"))
        assert (failure.reason, failure.fields) == ("UNKNOWN_MODEL", ("input.model",))
        assert "base, alias" in failure.message
        assert "german, french" in failure.message
