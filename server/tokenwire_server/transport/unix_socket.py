"""The UNIX socket of a server: created with its file mode, and removed only if it is still this server's.

gRPC unlinks the path that it was bound to when it stops, whoever listens there by then. So it is bound to a private name
beside the path, and the socket is moved to the path once it accepts connections, which also replaces a stale one atomically.
"""

import contextlib
import os
import pathlib
import socket
import stat
from collections.abc import Iterator

_PROBE_TIMEOUT = 1.0
"""Seconds for a server that may be listening on the path to accept a connection; a suspended one never does."""
_MAX_PATH_BYTES = 107
"""Maximum length of a UNIX socket's path on Linux: sizeof(sun_path) - 1."""


class BindError(Exception):
    """The server cannot listen on the address."""


class UnixSocket:
    """A UNIX socket that this server listens on."""

    def __init__(self, path: str, mode: int) -> None:
        """Name a socket.

        Args:
            path: where clients connect.
            mode: file mode of the socket.

        """
        self._path = pathlib.Path(path)
        self._mode = mode
        self._private = self._path.parent / f".{os.getpid()}"
        self._inode: tuple[int, int] | None = None

    @property
    def bind_address(self) -> str:
        """What gRPC is to be bound to."""
        return f"unix:{self._private}"

    def check(self) -> None:
        """Check that a socket can be created, and remove one that no server listens on.

        Raises:
            BindError: a server listens on the socket, the path is another kind of file, or its folder cannot be used.

        """
        folder = self._path.parent
        try:
            if not folder.is_dir():
                raise self._error(f"the folder {folder} does not exist")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._error(f"no permission to create a socket in {folder}")
            for path in (self._path, self._private):
                if (length := len(os.fsencode(path))) > _MAX_PATH_BYTES:
                    raise self._error(f"the path is too long: {length} bytes of at most {_MAX_PATH_BYTES}")
            if self._path.exists():
                self._remove_stale()
        except OSError as error:
            raise self._error(error.strerror or str(error)) from None

    def _remove_stale(self) -> None:
        if not stat.S_ISSOCK(self._path.stat().st_mode):
            raise self._error("the path exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_TIMEOUT)
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
                return
            except (BlockingIOError, TimeoutError):
                pass  # the server is busy or suspended, but it listens
        raise self._error("another server is listening on it")

    def _error(self, reason: str) -> BindError:
        return BindError(f"cannot listen on unix:{self._path}: {reason}")

    @contextlib.contextmanager
    def creation(self) -> Iterator[None]:
        """Create the socket inside this block with its file mode; a chmod afterwards would leave a gap."""
        previous = os.umask(0o777 & ~self._mode)
        try:
            yield
        finally:
            os.umask(previous)

    def publish(self) -> None:
        """Move the socket to its path: clients can connect from now on."""
        found = self._private.stat()
        self._private.rename(self._path)
        self._inode = (found.st_dev, found.st_ino)

    def remove(self) -> None:
        """Remove the socket, unless another one has taken its path. Safe to repeat."""
        with contextlib.suppress(OSError):
            found = self._path.stat()
            if (found.st_dev, found.st_ino) == self._inode:
                self._path.unlink()
