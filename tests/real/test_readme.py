"""What the README tells people to type works as typed; only the server's address is the test's."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from harness import COMMAND, ServerProcess, run

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:50051"


def commands(program: str) -> list[str]:
    text = "".join(code for language, code in BLOCKS if language == "bash").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith(f"{program} ")]


def python_blocks() -> list[str]:
    return [code for language, code in BLOCKS if language == "python"]


GRPCURL = commands("grpcurl")


def test_the_readme_has_an_example_of_each() -> None:
    called = {command.split()[-1].rpartition("/")[2] for command in GRPCURL}
    assert called >= {"list", "Check", "GetEngineInfo", "GetLoad", "Generate", "GenerateStream", "Abort"}
    assert len(python_blocks()) == 2
    assert len(commands("tokenwire serve")) == 1


def test_the_server_of_the_example_has_the_options_of_the_tests(arguments: list[str]) -> None:
    (command,) = commands("tokenwire serve")
    assert set(shlex.split(command)[3:]) <= set(arguments)


@pytest.mark.parametrize("command", GRPCURL, ids=lambda command: command.split()[-1])
def test_grpcurl(server: ServerProcess, command: str) -> None:
    """FIELD_LOG 18."""
    assert ADDRESS in command
    # grpcurl is in the environment's folder, as `tokenwire` is.
    line = f"PATH={shlex.quote(str(COMMAND.parent))}:$PATH {command.replace(ADDRESS, server.address)}"
    finished = run(["bash", "-c", line], timeout=60)
    assert finished.exit_code == 0, finished.stderr
    expected = {
        "list": "tokenwire.v1.EngineService",
        "tokenwire.v1.GenerationInput": "repeated uint32 prompt_token_ids = 2",
        "Check": '"status": "SERVING"',
        "GetEngineInfo": '"vocab_size": 49152',
        "GetLoad": '"num_running_reqs": 0',
        "Generate": "FINISH_REASON_LENGTH",
        "GenerateStream": "FINISH_REASON_LENGTH",
        "Abort": "ABORT_OUTCOME_ALREADY_FINISHED",
    }
    assert expected[command.rsplit(maxsplit=1)[-1].rpartition("/")[2]] in finished.stdout


def test_the_multiplex_example(server: ServerProcess) -> None:
    _, code = python_blocks()
    assert ADDRESS in code
    finished = run([sys.executable, "-c", code.replace(ADDRESS, server.address)], timeout=60)
    assert finished.exit_code == 0, finished.stderr
    lengths = [len(json.loads(line)) for line in finished.stdout.splitlines()]
    assert len(lengths) == 2
    # A sequence may end by EOS before its eight tokens.
    assert all(1 <= length <= 8 for length in lengths)


def test_the_python_example(server: ServerProcess) -> None:
    """FIELD_LOG 60."""
    code, _ = python_blocks()
    assert ADDRESS in code
    finished = run([sys.executable, "-c", code.replace(ADDRESS, server.address)], timeout=60)
    assert finished.exit_code == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[-1].endswith(" length")
    tokens = [token for line in lines for token in json.loads(line.partition("]")[0] + "]")]
    assert len(tokens) == 8
