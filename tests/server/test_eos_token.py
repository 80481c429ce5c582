"""The tokenizer's EOS id is found without the tokenizer, where `vllm serve` would find it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_engine import FakeEngineServer, make_config, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire_server.engine.eos import eos_token_id

ADDED = {"7": {"content": "<a>"}, "8": {"content": "<eos>", "special": True}}


def find(folder: Path, *, config_eos: Any = None, **files: Any) -> int | None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    text_config = SimpleNamespace() if config_eos is None else SimpleNamespace(eos_token_id=config_eos)
    model_config = SimpleNamespace(tokenizer=str(folder), tokenizer_revision=None, hf_text_config=text_config)
    return eos_token_id(model_config)


@pytest.mark.parametrize("token", ["<eos>", {"content": "<eos>", "lstrip": False, "__type": "AddedToken"}])
def test_an_added_token_of_tokenizer_config(tmp_path: Path, token: Any) -> None:
    assert find(tmp_path, config_eos=3, tokenizer_config={"eos_token": token, "added_tokens_decoder": ADDED}) == 8


def test_id_0(tmp_path: Path) -> None:
    config = {"eos_token": "<eos>", "added_tokens_decoder": {"0": {"content": "<eos>"}}}
    assert find(tmp_path, config_eos=3, tokenizer_config=config) == 0


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"added_tokens": [{"id": 9, "content": "<eos>"}], "model": {"vocab": {"<eos>": 1}}}, 9),
        ({"added_tokens": [], "model": {"vocab": {"a": 0, "<eos>": 4}}}, 4),
        ({"model": {"vocab": [["a", -1.0], ["<eos>", -2.0]]}}, 1),
    ],
)
def test_the_vocabulary_of_tokenizer_json(tmp_path: Path, tokenizer: Any, expected: int) -> None:
    found = find(tmp_path, config_eos=3, tokenizer_config={"eos_token": "<eos>"}, tokenizer=tokenizer)
    assert found == expected


@pytest.mark.parametrize("config", [{}, {"eos_token": None}, {"eos_token": {}}])
def test_a_tokenizer_without_an_eos_token(tmp_path: Path, config: Any) -> None:
    assert find(tmp_path, config_eos=3, tokenizer_config=config) == 3


def test_a_token_whose_id_is_nowhere_is_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find(tmp_path, config_eos=3, tokenizer_config={"eos_token": "<eos>"}) == 3
    assert "<eos>" in caplog.text


@pytest.mark.parametrize(("value", "expected"), [(3, 3), ([5, 6], 5), ([], None), (None, None)])
def test_a_folder_without_tokenizer_has_the_id_of_config_json(tmp_path: Path, value: Any, expected: int | None) -> None:
    assert find(tmp_path, config_eos=value) == expected


async def test_engine_info_names_the_tokenizers_eos_first(tmp_path: Path) -> None:
    """FIELD_LOG S2."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [30, 8, 2]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "added_tokens_decoder": ADDED}))
    async with FakeEngineServer.run(make_config(tmp_path)) as server:
        info = (await within(server.stub.GetEngineInfo(pb.GetEngineInfoRequest()))).info
    assert list(info.eos_token_ids) == [8, 30, 2]
