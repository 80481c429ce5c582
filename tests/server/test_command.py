import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

import tokenwire._command
from tokenwire._cli.app import app
from tokenwire._cli.requires import requires
from tokenwire._version import __version__


@pytest.mark.parametrize(
    "arguments",
    [
        ["MODEL", "--port", "0", "-tp", "2", "--max-model-len=512"],
        ["--port", "0", "MODEL", "--no-enable-prefix-caching", "--version", "--"],
        ["--help=all"],
        [],
    ],
)
def test_serve_hands_every_argument_over_untouched(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    received: list[list[str]] = []

    def main(argv: list[str]) -> int:
        received.append(argv)
        return 7

    module = ModuleType("tokenwire_server.process.main")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenwire_server.process.main", module)
    assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 7
    assert received == [arguments]


def test_a_missing_package_is_one_line_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_info, requires("pip install it"):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    assert exit_info.value.exit_code == 2
    line = "tokenwire: this command needs the package vllm, which is not installed: pip install it\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'vllm.gone'", name="vllm.gone"),
        ImportError("cannot import name 'Gone' from 'vllm.outputs'", name="vllm.outputs"),
    ],
)
def test_another_version_of_vllm_names_those_supported(capsys: pytest.CaptureFixture[str], error: ImportError) -> None:
    """FAULTS G1."""
    with pytest.raises(typer.Exit) as exit_info, requires("pip install it"):
        raise error
    assert exit_info.value.exit_code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"has no {error.name}: install vllm" in line
    assert ">=0.32" in line


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_help_does_not_wait_for_vllm(option: str) -> None:
    """FAULTS F5: its import takes ten seconds."""
    script = (
        "import sys; sys.argv = ['tokenwire', 'serve', sys.argv[1]]; import atexit, tokenwire._command\n"
        "atexit.register(lambda: print('vllm' in sys.modules, 'torch' in sys.modules))\n"
        "tokenwire._command.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, option], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False False"
    for name in ("--port", "--drain-timeout", "--simulated-device", "--smg", "--help=all"):
        assert name in done.stdout


def test_a_missing_module_of_our_own_keeps_its_traceback() -> None:
    with pytest.raises(ModuleNotFoundError), requires("pip install it"):
        raise ModuleNotFoundError("No module named 'tokenwire_server.gone'", name="tokenwire_server.gone")


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"tokenwire {__version__}\n")


def test_the_command_without_typer_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenwire._cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_info:
        tokenwire._command.main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "tokenwire: the command needs its extra: pip install 'tokenwire[cli]'\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_as_good_as_none(closed: str) -> None:
    # Nothing listens on port 1.
    command = f"{Path(sys.executable).with_name('tokenwire')} health --target 127.0.0.1:1 {closed}"
    assert subprocess.run(["/bin/sh", "-c", command], timeout=60, check=False).returncode == 3
