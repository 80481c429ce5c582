import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

import tokenwire
from harness import ServerProcess, run
from harness.vllm_http import VllmServer, vllm_server
from tokenwire_server.demo_model import ensure_demo_model

FOLDER = Path(__file__).parent

# At most four sequences run at once, so that a test can fill the engine and see a request wait for its place.
ENGINE_ARGUMENTS = [
    *("--max-model-len", "2048", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", "268435456", "--gpu-memory-utilization", "0.2"),
    "--enforce-eager",
]

QUESTION = "How many countries are in the European Union?"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.real)
            # A start takes 20 seconds, and several times that on a machine that is busy with something else.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def model() -> str:
    return str(ensure_demo_model(progress=print))


@pytest.fixture(scope="session")
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def encode(tokenizer: Any) -> Callable[[str], list[int]]:
    """Make the prompt of a question by the model's chat template."""

    def encode(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    return encode


@pytest.fixture(scope="session")
def prompt(encode: Callable[[str], list[int]]) -> list[int]:
    return encode(QUESTION)


@pytest.fixture(scope="session")
def arguments(model: str) -> list[str]:
    """What starts a server for a test that needs one of its own."""
    return [model, *ENGINE_ARGUMENTS]


@pytest.fixture(scope="session")
def server(arguments: list[str]) -> Iterator[ServerProcess]:
    """The server that all tests share."""
    with ServerProcess([*arguments, "--smg"], ready_timeout=250) as server:
        yield server


@pytest.fixture(scope="session")
def vllm(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The `vllm serve` that all tests share, with the same engine flags; ready after its `wait_ready`."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm_server([*arguments, "--enable-scale-out"], log, wait=False) as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[tokenwire.AsyncClient]:
    async with tokenwire.AsyncClient(server.address) as client:
        yield client


class Reference(NamedTuple):
    """A request, and what AsyncLLM without tokenwire answers to it."""

    prompt: list[int]
    params: dict[str, Any]
    answer: dict[str, Any]

    @property
    def sampling_params(self) -> tokenwire.SamplingParams:
        return tokenwire.SamplingParams(**self.params)


REFERENCE_NAMES = ["eos", "length", "stop token", "penalties"]


@pytest.fixture(scope="session")
def references(model: str, encode: Callable[[str], list[int]], tmp_path_factory: Any) -> dict[str, Reference]:
    """Answers of AsyncLLM with the same engine arguments, in a process that has ended."""
    greedy: dict[str, Any] = {"temperature": 0.0, "logprobs": 3}
    # The answer to the question has "member" in it.
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "eos": (QUESTION, {"max_tokens": 64}),
        "length": ("Tell me a long story about a fox and a bear.", {"max_tokens": 96, "ignore_eos": True}),
        "stop token": (QUESTION, {"max_tokens": 64, "stop_token_ids": [4028]}),
        "penalties": (
            "Count from one to fifty.",
            {"max_tokens": 48, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        ),
    }
    assert list(requests) == REFERENCE_NAMES
    job: dict[str, Any] = {
        "engine_arguments": ["--model", model, *ENGINE_ARGUMENTS],
        "requests": {
            name: {"prompt": encode(question), "params": greedy | params}
            for name, (question, params) in requests.items()
        },
    }
    folder: Path = tmp_path_factory.mktemp("reference")
    (folder / "job.json").write_text(json.dumps(job))
    finished = run([sys.executable, FOLDER / "reference.py", folder / "job.json", folder / "answers.json"], timeout=250)
    assert finished.exit_code == 0, finished.stderr
    answers = json.loads((folder / "answers.json").read_text())
    return {name: Reference(**request, answer=answers[name]) for name, request in job["requests"].items()}


@pytest.fixture(params=REFERENCE_NAMES)
def reference(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Reference:
    name: str = request.param
    return references[name]
