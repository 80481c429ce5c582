"""Validation of fields that contain JSON text."""

import json
from typing import Any

from tokenwire_server.conversion.fields import quoted
from tokenwire_server.errors import invalid_field

_MAX_BYTES = 1024 * 1024
"""Maximum size of a field, as in the contract: it is parsed on the event loop, where other requests wait for it."""
_MAX_DEPTH = 64
"""Maximum nesting of arrays and objects; the engine process decodes them recursively and dies at its own limit."""


def json_object(text: str, path: str) -> dict[str, Any]:
    """Parse a field that must be a JSON object without duplicate keys.

    NaN and infinities, lone surrogates and integers beyond 64 bits are refused: Python's parser accepts them, but they
    cannot be encoded for the engine process.

    Args:
        text: the field's value.
        path: path of the field in the request message, for errors.

    Returns:
        The parsed object.

    Raises:
        RequestError: INVALID_FIELD.

    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise invalid_field(path, f"must not contain duplicate keys, got {quoted(key)} twice")
            result[key] = value
        return result

    _check_size(text, path)
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid_field(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid_field(path, "must be a JSON object")
    _check_json(value, path)
    return value


def check_json_object(text: str, path: str) -> None:
    """Check that a field that is passed on verbatim contains a JSON object.

    Raises:
        RequestError: INVALID_FIELD.

    """
    _check_size(text, path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_field(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid_field(path, "must be a JSON object")


def _check_size(text: str, path: str) -> None:
    # A character takes at least one byte, so that a much longer text is refused without encoding it.
    if len(text) > _MAX_BYTES or len(text.encode()) > _MAX_BYTES:
        raise invalid_field(path, f"must have at most {_MAX_BYTES} bytes")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_json(value: dict[str, Any], path: str) -> None:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _check_level(outer, path)]
        if not level:
            return
    raise invalid_field(path, f"must nest arrays and objects at most {_MAX_DEPTH} levels deep")


def _check_level(value: Any, path: str) -> list[Any]:
    """Check the strings and numbers of an array or object and return the arrays and objects in it."""
    inner: list[Any] = []
    for item in (*value, *value.values()) if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            inner.append(item)
        elif isinstance(item, str):
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                raise invalid_field(path, "must not contain lone surrogates")
        elif isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise invalid_field(path, "must contain only integers in [-2^63, 2^64 - 1]")
    return inner
