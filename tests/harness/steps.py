"""A step log that is read while it grows."""

from pathlib import Path

import msgspec

from tokenwire_server.simulated_device.step_log import Step


class Steps:
    """The steps of a log; each line is read once, however often a wait looks."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._decode = msgspec.json.Decoder(Step).decode
        self._size = 0
        self._steps: list[Step] = []

    def read(self) -> list[Step]:
        """Return the steps so far; a line that is being written is left for the next call."""
        with self._log.open("rb") as file:
            file.seek(self._size)
            added = file.read()
        *lines, rest = added.split(b"\n")
        self._steps += map(self._decode, lines)
        self._size += len(added) - len(rest)
        return self._steps.copy()
