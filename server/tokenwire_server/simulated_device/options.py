"""The options of the simulated device and their command-line form: `step_ms=10,eos_after=32`."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final


class SimulatedDeviceError(ValueError):
    """An option or an engine argument that the device does not support. The message is one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedDeviceOptions:
    """Options of the simulated device. Steps are counted from 1, separately in each data-parallel rank."""

    step_ms: float = 10.0
    """Duration of a step without prefill, in milliseconds. 0 means as fast as possible."""

    prefill_us_per_token: float = 0.0
    """Microseconds that each prompt token adds to its step; prefill_tokens_per_s is the reciprocal."""

    eos_after: int | None = None
    """Output length, EOS included, at which EOS occurs. None means never: sequences run to max_tokens."""

    async_scheduling: bool = False
    """Whether vLLM schedules a step while the previous one is still running, as it does on GPUs."""

    fail_at_step: int | None = None
    """The step that raises an exception, which ends the engine."""

    hang_at_step: int | None = None
    """The step that never completes."""

    error_request_at_step: int | None = None
    """The step in which the first request of the batch finishes with "error"; other requests are not affected."""

    error_prompt_id: int | None = None
    """Requests whose prompt begins with this id finish with "error" instead of a second token."""

    step_log: str | None = None
    """File that one JSON line per step is written to (see `step_log`); truncated at start-up."""

    def __post_init__(self) -> None:
        if self.fail_at_step is not None and self.hang_at_step is not None:
            raise SimulatedDeviceError(
                "fail_at_step and hang_at_step are mutually exclusive: the first one ends the engine"
            )
        end = self.fail_at_step or self.hang_at_step
        if end is not None and self.error_request_at_step is not None and self.error_request_at_step >= end:
            raise SimulatedDeviceError(
                f"error_request_at_step={self.error_request_at_step} is never reached: the engine ends at step {end}"
            )


def parse(text: str) -> SimulatedDeviceOptions:
    """Parse options of the form `name=value,name=value`; an empty text means all defaults.

    Returns:
        The options.

    Raises:
        SimulatedDeviceError: an option is unknown, given twice, has an invalid value or conflicts with another.

    """
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
            raise SimulatedDeviceError("prefill_us_per_token and prefill_tokens_per_s are mutually exclusive")
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
        raise ValueError("an integer, 1 or more")
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
        raise ValueError("the path of a file")
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
