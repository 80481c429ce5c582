"""Types of command-line arguments: each parses a text or raises argparse.ArgumentTypeError with a one-line message."""

import argparse
import math
import re

import msgspec

from tokenwire_server import simulated_device
from tokenwire_server.config import OPEN_SERVICES, AdapterPath
from tokenwire_server.simulated_device.options import SimulatedDeviceOptions

_MAX_MESSAGE_BYTES = 2**31 - 1
"""gRPC's channel options are int32."""
_MAX_PORT = 65_535


def port(text: str) -> int:
    """Parse a TCP port, 0 included."""
    # gRPC itself would take the number modulo 65,536.
    if not (text.isascii() and text.isdigit() and int(text) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {_MAX_PORT}, got {text!r}")
    return int(text)


def positive_int(text: str) -> int:
    """Parse a positive integer."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a number of seconds, 0 included."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return number


def positive_seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    if not (number := seconds(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def message_bytes(text: str) -> int:
    """Parse a maximum message size in bytes."""
    if (number := positive_int(text)) > _MAX_MESSAGE_BYTES:
        raise argparse.ArgumentTypeError(f"must be at most {_MAX_MESSAGE_BYTES}, got {text}")
    return number


def file_mode(text: str) -> int:
    """Parse the file mode of a socket, three octal digits with an optional leading 0."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"must be three octal digits such as 0660, got {text!r}")
    return int(text, 8)


def open_services(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of services, or "none"."""
    names = () if text == "none" else tuple(text.split(","))
    if unknown := [name for name in names if name not in OPEN_SERVICES]:
        raise argparse.ArgumentTypeError(f"unknown service {unknown[0]!r}; known: {', '.join(OPEN_SERVICES)}")
    return names


def adapter_path(text: str) -> AdapterPath:
    """Parse a LoRA adapter: NAME=PATH, or vLLM's JSON form, an object with name and path."""
    if "=" in text and not text.lstrip().startswith("{"):
        name, path = text.split("=", 1)
        return AdapterPath(name, path)
    try:
        return msgspec.json.decode(text, type=_AdapterJson).to_path()
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise argparse.ArgumentTypeError(f"must be NAME=PATH or a JSON object, got {text!r}: {error}") from None


class _AdapterJson(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False

    def to_path(self) -> AdapterPath:
        return AdapterPath(self.name, self.path, self.base_model_name, self.is_3d_lora_weight)


def simulated_device_options(text: str) -> SimulatedDeviceOptions:
    """Parse the options of the simulated device."""
    try:
        return simulated_device.parse(text)
    except simulated_device.SimulatedDeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
