"""A command on a pseudo-terminal, as a person sees it."""

import os
import pty
import subprocess
from pathlib import Path


class Terminal:
    """A running command; what it prints is read by `until`. `kind` is the terminal's: a dumb one cannot move its cursor."""

    def __init__(self, *command: str | Path, kind: str = "dumb", columns: int = 160) -> None:
        self._own, other = pty.openpty()
        environment = os.environ | {"TERM": kind, "COLUMNS": str(columns)}
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self._seen = b""

    def until(self, text: str) -> str:
        """Read up to a text, and give what came before it."""
        while text.encode() not in self._seen:
            self._seen += os.read(self._own, 4096)
        before, _, self._seen = self._seen.partition(text.encode())
        return before.decode()

    def type(self, text: str) -> None:
        """Write as if typed."""
        os.write(self._own, text.encode())

    def close(self) -> None:
        """End the command."""
        self.process.kill()
        self.process.wait()
        os.close(self._own)
