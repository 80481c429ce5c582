"""What can be set on the simulated device, and how it is written: `step_ms=10,eos_after=32`."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final


class SimulatedDeviceError(ValueError):
    """An option or an engine argument that the device cannot follow; the message is one line for a person."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedDeviceOptions:
    """Options of the simulated device. Steps count from 1, in each data-parallel rank for itself."""

    step_ms: float = 10.0
    """Milliseconds that the device works on a step, besides prefill. 0 means as fast as the host can."""

    prefill_us_per_token: float = 0.0
    """Microseconds added to a step per prompt token computed in it; also settable as prefill_tokens_per_s."""

    eos_after: int | None = None
    """Output length, EOS included, at which EOS comes. None means never: sequences run to max_tokens."""

    async_scheduling: bool = False
    """Whether vLLM schedules a step while the one before is still on the device, as it does on GPUs."""

    fail_at_step: int | None = None
    """The step that raises, which ends the engine."""

    hang_at_step: int | None = None
    """The step that never comes back."""

    error_request_at_step: int | None = None
    """The step in which the first request of the batch finishes with "error"; the others do not notice."""

    error_prompt_id: int | None = None
    """Every request whose prompt begins with this id finishes with "error" in place of its second token."""

    step_log: str | None = None
    """File that gets one JSON line per step (see `step_log`); it is emptied at the start."""

    def __post_init__(self) -> None:
        if self.fail_at_step is not None and self.hang_at_step is not None:
            raise SimulatedDeviceError(
                "fail_at_step and hang_at_step exclude each other: the first one ends the engine"
            )
        end = self.fail_at_step or self.hang_at_step
        if end is not None and self.error_request_at_step is not None and self.error_request_at_step >= end:
            raise SimulatedDeviceError(
                f"error_request_at_step={self.error_request_at_step} is never reached: the engine ends at step {end}"
            )


def parse(text: str) -> SimulatedDeviceOptions:
    """Read options written as `name=value,name=value`; an empty text means all defaults."""
    given: dict[str, Any] = {}
    for part in text.split(",") if text.strip() else []:
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator:
            raise SimulatedDeviceError(f"simulated device option {part.strip()!r}: expected name=value")
        if name not in _READERS:
            raise SimulatedDeviceError(f"unknown simulated device option {name!r}; known: {', '.join(_READERS)}")
        if name in given:
            raise SimulatedDeviceError(f"simulated device option {name!r} is given twice")
        try:
            given[name] = _READERS[name](value)
        except ValueError as error:
            raise SimulatedDeviceError(f"simulated device option {name}={value}: expected {error}") from None
    if (rate := given.pop("prefill_tokens_per_s", None)) is not None:
        if "prefill_us_per_token" in given:
            raise SimulatedDeviceError("prefill_us_per_token and prefill_tokens_per_s exclude each other")
        given["prefill_us_per_token"] = 1e6 / rate
    return SimulatedDeviceOptions(**given)


def _duration(text: str) -> float:
    if not (_is_number(text) and 0 <= float(text) < math.inf):
        raise ValueError("a number, 0 or more")
    return float(text)


def _rate(text: str) -> float:
    if not (_is_number(text) and 0 < float(text) < math.inf):
        raise ValueError("a number above 0")
    return float(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError("a whole number, 1 or more")
    return int(text)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a token id")
    return int(text)


def _switch(text: str) -> bool:
    if text not in {"on", "off"}:
        raise ValueError("on or off")
    return text == "on"


def _path(text: str) -> str:
    if not text:
        raise ValueError("a file's path")
    return str(Path(text).expanduser().absolute())


_READERS: Final[dict[str, Callable[[str], object]]] = {
    "step_ms": _duration,
    "prefill_us_per_token": _duration,
    "prefill_tokens_per_s": _rate,
    "eos_after": _count,
    "async_scheduling": _switch,
    "fail_at_step": _count,
    "hang_at_step": _count,
    "error_request_at_step": _count,
    "error_prompt_id": _token_id,
    "step_log": _path,
}
