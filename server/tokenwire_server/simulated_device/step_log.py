"""The step log: one JSON line per step, written when the step begins. Tests read it in place of a clock.

All data-parallel ranks append to the same file; a line is written in one piece.
"""

import os
import re
from pathlib import Path

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the device was given for one step. Ids are the engine's internal ones."""

    step: int
    """The step's number in its rank, from 1. A call that only drops requests repeats the last step's number."""

    rank: int
    """The data-parallel rank."""

    tokens: dict[str, int]
    """Tokens computed in this step, by request; empty when the call only drops requests."""

    prefill: dict[str, int]
    """Of these, prompt tokens (and tokens computed again after a preemption); requests with none are left out."""

    held: list[str]
    """All requests that the device knows in this step, those that wait included."""

    dropped: list[str]
    """Requests that the engine dropped just before this step: finished or aborted."""

    def holds(self, request_id: str) -> bool:
        """Return whether the device knew a sequence of the request with this external or internal id."""
        return any(belongs(internal, request_id) for internal in self.held)

    def computes(self, request_id: str) -> int:
        """Return how many tokens of the request with this external or internal id the step computed."""
        return sum(count for internal, count in self.tokens.items() if belongs(internal, request_id))


def belongs(internal_id: str, request_id: str) -> bool:
    """Return whether an internal id is `request_id`, or vLLM made it from it.

    vLLM appends a dash and 8 hexadecimal digits, and puts the sequence's index and _ in front when n > 1.
    """
    return re.fullmatch(rf"(\d+_)?{re.escape(request_id)}(-[0-9a-f]{{8}})?", internal_id) is not None


class StepLogWriter:
    """Appends steps to the file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._encode = msgspec.json.Encoder().encode

    def write(self, step: Step) -> None:
        """Append one line."""
        os.write(self._file, self._encode(step) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(path: str | Path) -> list[Step]:
    """Return the steps so far; a line that is being written is left for the next call."""
    *lines, _ = Path(path).read_bytes().split(b"\n")
    decoder = msgspec.json.Decoder(Step)
    return [decoder.decode(line) for line in lines]
