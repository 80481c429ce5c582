"""Certificate, key and token files: read at start-up and reloaded when they change."""

import logging
import pathlib
import stat
from collections.abc import Iterable

logger = logging.getLogger(__name__)

Fingerprint = tuple[tuple[int, ...] | None, ...]


class AccessError(Exception):
    """A certificate, key or token file cannot be used. The message is one line and quotes nothing from the file."""


def fingerprint(paths: Iterable[pathlib.Path]) -> Fingerprint:
    """Return a value that changes when one of the files is written, replaced or removed, or its permissions change."""
    return tuple(map(_fingerprint, paths))


def _fingerprint(path: pathlib.Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # ctime also changes with the mode or the owner, and when a copy preserves the mtime of its original.
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read(option: str, path: pathlib.Path) -> bytes:
    """Return the content of the file that a command-line option names.

    Raises:
        AccessError: the file cannot be read.

    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise AccessError(f"{option} {path}: {error.strerror}") from None


def warn_if_world_readable(option: str, path: pathlib.Path) -> None:
    """Log a warning if every user of this machine can read a secret."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:  # removed after it was read; the next reload reports it
        return
    if mode & stat.S_IROTH:
        logger.warning("%s %s can be read by every user of this machine; run chmod o-r on it", option, path)
