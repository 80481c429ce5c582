"""The cache of the demo model.

A cached folder is used only if its files match its manifest. It is built under another name and renamed after all of its
files are on disk, so an interrupted build is never taken for a model.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tokenwire_server.demo_model.conversion import convert
from tokenwire_server.demo_model.manifest import find_mismatch, write_manifest
from tokenwire_server.demo_model.model import NAME, DemoModelError, Progress

Build = Callable[[Path, Progress], None]
"""Writes the model into an empty folder."""


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder: $TOKENWIRE_CACHE, else tokenwire in $XDG_CACHE_HOME or ~/.cache."""
    if own := environment.get("TOKENWIRE_CACHE"):
        return Path(own).expanduser().absolute()
    platform = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(platform).expanduser().absolute() / "tokenwire"


def ensure_demo_model(root: Path | None = None, *, progress: Progress, build: Build | None = None) -> Path:
    """Return the folder of the cached model; build it first if it is missing or differs from its manifest.

    Args:
        root: the cache folder; None means `cache_root()`.
        progress: receives one line of text per step.
        build: writes the model into an empty folder; None means `convert`.

    Raises:
        DemoModelError: the model cannot be built, or the cache cannot be read or written.

    """
    models = (cache_root() if root is None else root) / "models"
    folder = models / NAME
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{NAME}.lock", progress):
            if (mismatch := find_mismatch(folder)) is None:
                progress(f"using {NAME} from the cache (verified)")
                return folder
            if folder.exists():
                progress(f"rebuilding the model in {folder}: {mismatch}")
            _build(folder, progress, convert if build is None else build)
            return folder
    except OSError as error:
        raise DemoModelError(f"cannot cache the demo model in {models}: {error}") from error


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Lock out other processes; the kernel releases the lock when the process ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is building or verifying the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, progress: Progress, build: Build) -> None:
    """Build the model next to `folder` and rename it to `folder`."""
    # Left by killed processes: the lock is held, so no other process is building.
    for leftover in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:
        model = Path(work) / "model"
        model.mkdir()
        build(model, progress)
        write_manifest(model)
        for path in (*model.iterdir(), model):
            _sync(path)
        if folder.exists():
            folder.rename(Path(work) / "discarded")
        model.rename(folder)
        _sync(folder.parent)


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
