"""The files that access depends on: read at start, and again when they change."""

import logging
import pathlib
import stat
from collections.abc import Iterable

logger = logging.getLogger(__name__)

State = tuple[tuple[int, ...] | None, ...]


class AccessError(Exception):
    """A file that access depends on cannot be used. The text is one line and quotes nothing of the file."""


def state(paths: Iterable[pathlib.Path]) -> State:
    """Return what differs once one of the files has been written to, replaced, removed or made readable."""
    return tuple(map(_state, paths))


def _state(path: pathlib.Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # The last one also tells of a new mode or owner, and of a copy that kept its original's time.
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read(option: str, path: pathlib.Path) -> bytes:
    """Read a file that an option names.

    Raises:
        AccessError: it cannot be read.

    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise AccessError(f"{option} {path}: {error.strerror}") from None


def warn_if_public(option: str, path: pathlib.Path) -> None:
    """Warn of a secret that every user of the machine can read."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:  # it was there when it was read; whoever watches it looks again
        return
    if mode & stat.S_IROTH:
        logger.warning("%s %s can be read by every user of this machine; chmod o-r would end that", option, path)
