from pathlib import Path

import pytest
from transformers import AutoTokenizer

from harness.tokenizers import write_folder
from tokenwire import AsyncClient, EngineInfo, InvalidArgumentError, TokenwireError
from tokenwire._engine_info import KvCache, Limits, Parallelism
from tokenwire.text import (
    ChatTemplateError,
    TextClient,
    TextTokenizer,
    TokenizerError,
    TokenizerMismatchError,
)

MESSAGES = [{"role": "user", "content": "one, two"}]


def test_encodes_as_transformers(folder: Path, tokenizer: TextTokenizer) -> None:
    pretrained = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.encode("the story") == pretrained.encode("the story")
    expected = pretrained.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(MESSAGES) == expected
    assert tokenizer.decode(expected, skip_special_tokens=False).endswith("<|start|>assistant\n")


def test_text_parts_are_one_text(tokenizer: TextTokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = tokenizer.encode_chat([{"role": "user", "content": "one\ntwo"}])
    assert tokenizer.encode_chat([{"role": "user", "content": parts}]) == joined
    with pytest.raises(ChatTemplateError, match="text parts"):
        tokenizer.encode_chat([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize("half", ["\ud83d", "a\udcff"])
def test_half_of_a_surrogate_pair_is_no_text(tokenizer: TextTokenizer, half: str) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt: must be text that UTF-8 can encode"):
        tokenizer.encode(half)
    with pytest.raises(InvalidArgumentError, match="prompt: must be text that UTF-8 can encode"):
        tokenizer.encode_chat([{"role": "user", "content": half}])


def test_template_options(tokenizer: TextTokenizer) -> None:
    text = tokenizer.decode(tokenizer.encode_chat(MESSAGES, {"add_generation_prompt": False}))
    assert not text.endswith("assistant\n")


def test_a_template_that_refuses(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    tokenizer = TextTokenizer.load(write_folder(tmp_path, chat_template=template))
    with pytest.raises(ChatTemplateError, match="refuses the messages: system first"):
        tokenizer.encode_chat(MESSAGES)


def test_no_template(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_folder(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="has no chat template: send a text or token ids"):
        tokenizer.encode_chat(MESSAGES)


def test_truncation_of_the_file_is_put_aside(tmp_path: Path) -> None:
    write_folder(tmp_path)
    saved = TextTokenizer.load(tmp_path)
    saved._backend.enable_truncation(2)
    saved._backend.save(str(tmp_path / "tokenizer.json"))
    assert len(TextTokenizer.load(tmp_path).encode("one two three four")) > 2


@pytest.mark.parametrize("content", [None, "{}", "not JSON"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"cannot load a tokenizer from .*: \w+: "):
        TextTokenizer.load(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="not a folder"):
        TextTokenizer.load(tmp_path / "absent")


class Client(AsyncClient):
    def __init__(self, model: str, vocab_size: int | None) -> None:
        super().__init__()
        self._info = EngineInfo(
            model=model,
            vocab_size=vocab_size,
            limits=Limits(),
            parallelism=Parallelism(),
            kv_cache=KvCache(),
            contract_revision=1,
            tokenwire_version="1",
        )

    async def engine_info(self, **_options: object) -> EngineInfo:
        return self._info


async def test_open_takes_the_engine_s_own_folder(folder: Path, tokenizer: TextTokenizer) -> None:
    text = await TextClient.open(Client(str(folder), tokenizer.vocab_size))
    assert text.tokenizer.vocab_size == tokenizer.vocab_size
    assert (await TextClient.open(Client("elsewhere", None), folder)).tokenizer.has_chat_template


async def test_open_needs_a_folder() -> None:
    with pytest.raises(TokenizerError, match="pass the tokenizer's folder"):
        await TextClient.open(Client("owner/model", 400))


async def test_a_tokenizer_of_another_model(folder: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(TokenizerMismatchError, match="belongs to another model") as caught:
        await TextClient.open(Client(str(folder), tokenizer.vocab_size - 1))
    assert isinstance(caught.value, TokenwireError)
