import warnings
from pathlib import Path

import pytest
from hypothesis import settings

from harness.tokenizers import write_folder
from tokenwire.text import TextTokenizer

# Warnings are errors in tests, and vLLM's own imports warn.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.detokenizer  # noqa: F401

# The duration of an example means nothing on a shared machine.
settings.register_profile("text", deadline=None)
settings.load_profile("text")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)
