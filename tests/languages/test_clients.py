"""The clients of examples/ in other languages do what their readmes say, against one live server."""

from pathlib import Path

import pytest

from harness.pages import ADDRESS, ROOT, bash_blocks, type_in
from harness.simulated import VOCABULARY, Simulated
from tokenwire_server.simulated_device.formula import expected_tokens

PROMPT = [504, 3575, 282, 4649, 314]
REFUSED = "INVALID_FIELD input.sampling_params.top_p"

EXAMPLES = {language: ROOT / "examples" / language for language in ("node", "cpp", "go")}


def commands(folder: Path) -> tuple[str, str]:
    """Return what the readme says to build with, and to run; what needs sudo and `npm ci` are the set-up's."""
    lines = [line for block in bash_blocks(folder / "README.md") for line in block.code.splitlines()]
    *build, call = [line for line in lines if not line.startswith(("sudo ", "npm ci"))]
    return "set -e\n" + "\n".join(build), call


def expected_lines() -> list[str]:
    def tokens(seed: int | None = None) -> str:
        ids = expected_tokens(PROMPT, 8, vocab_size=VOCABULARY, eos_token_ids=[2], seed=seed)
        return " ".join(map(str, ids))

    return [
        "health: SERVING",
        f"generate: LENGTH {tokens()}",
        "usage: 5 8",
        f"stream: LENGTH {tokens()}",
        # The requests of a stream end in any order: these four are compared sorted.
        f"multiplex 1.0: LENGTH {tokens()}",
        f"multiplex 2.0: LENGTH {tokens(seed=7)}",
        f"multiplex 2.1: LENGTH {tokens(seed=8)}",
        f"multiplex 3: {REFUSED.replace('input', 'submit.input')}",
        "abort: ABORTED",
        "aborted stream: ABORT",
        f"refused: {REFUSED}",
    ]


@pytest.fixture(scope="session", params=EXAMPLES)
def folder(request: pytest.FixtureRequest) -> Path:
    """An example's folder, with what its readme builds there."""
    folder = EXAMPLES[request.param]
    build, _ = commands(folder)
    finished = type_in(build, folder, {}, timeout=500)
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    return folder


# The first test of each language compiles it: half a minute for C++, several times that on a busy machine.
@pytest.mark.timeout(600)
def test_every_call(folder: Path, simulated: Simulated) -> None:
    _, call = commands(folder)
    finished = type_in(call, folder, {ADDRESS: simulated.address})
    assert finished.exit_code == 0, finished.stderr
    # The generated names of an enum's values have its own name in front in some languages.
    printed = finished.stdout.replace("FINISH_REASON_", "").replace("ABORT_OUTCOME_", "").splitlines()
    expected = expected_lines()
    assert sorted(printed[4:8]) == expected[4:8]
    assert printed[:4] + printed[8:] == expected[:4] + expected[8:]


@pytest.mark.timeout(600)
def test_a_server_that_is_not_there_ends_the_program_with_an_error_of_one_line(folder: Path) -> None:
    _, call = commands(folder)
    # Nothing listens on port 1.
    finished = type_in(call, folder, {ADDRESS: "127.0.0.1:1"})
    assert finished.exit_code == 1
    assert len(finished.stderr.splitlines()) == 1
    assert not finished.stdout
