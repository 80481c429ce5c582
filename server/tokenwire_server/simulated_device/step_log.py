"""The step log: one JSON line per step, written when the step begins. Tests wait for its lines instead of sleeping.

All data-parallel ranks append to the same file, each line with one write.
"""

import os
import re
from pathlib import Path

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step as scheduled by the engine. Request ids are internal ids."""

    step: int
    """Number of the step in its rank, from 1. A call that only drops requests has the number of the last step."""

    rank: int
    """The data-parallel rank."""

    tokens: dict[str, int]
    """Number of tokens computed in this step, by request; empty if the call only drops requests."""

    prefill: dict[str, int]
    """Of these, prompt tokens and tokens recomputed after a preemption; without requests that have none."""

    held: list[str]
    """All requests on the device in this step, including those without scheduled tokens."""

    dropped: list[str]
    """Requests that the engine removed before this step: finished or aborted."""

    def holds(self, request_id: str) -> bool:
        """Return whether a sequence of the request with this external or internal id was on the device."""
        return any(belongs(internal, request_id) for internal in self.held)

    def computes(self, request_id: str) -> int:
        """Return how many tokens of the request with this external or internal id the step computed."""
        return sum(count for internal, count in self.tokens.items() if belongs(internal, request_id))


def belongs(internal_id: str, request_id: str) -> bool:
    """Return whether an internal id is `request_id` or derived from it.

    vLLM appends "-" and 8 hexadecimal digits, and for n > 1 prepends the index of the sequence and "_".
    """
    return re.fullmatch(rf"(\d+_)?{re.escape(request_id)}(-[0-9a-f]{{8}})?", internal_id) is not None


class StepLogWriter:
    """Appends steps to a log."""

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
    """Return the steps in a log, without an incomplete last line."""
    *lines, _ = Path(path).read_bytes().split(b"\n")
    decoder = msgspec.json.Decoder(Step)
    return [decoder.decode(line) for line in lines]
