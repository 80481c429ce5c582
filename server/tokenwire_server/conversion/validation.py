"""Checks of a request that need nothing but the message itself."""

import json
import re
from typing import Any

from google.protobuf.duration_pb2 import Duration

from tokenwire.v1 import engine_service_pb2, generation_pb2
from tokenwire_server.errors import invalid_field

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_MAX_CACHE_SALT = 1024
_MAX_ABORT_IDS = 10_000
_MAX_REMEMBER_SECONDS = 3600.0
_MAX_JSON_DEPTH = 64
"""Levels of arrays and objects; the engine process reads them recursively, and would not survive its own limit."""


def check_input(message: generation_pb2.GenerationInput, path: str = "input") -> None:
    """Check a GenerationInput; `path` is its own path in the request message.

    Raises:
        RequestError: with the field at fault, INVALID_FIELD.

    """
    if message.request_id:
        check_request_id(message.request_id, f"{path}.request_id")
    if not message.prompt_token_ids:
        raise invalid_field(f"{path}.prompt_token_ids", "must hold at least one token id")
    if message.HasField("cache_salt") and not 1 <= len(message.cache_salt) <= _MAX_CACHE_SALT:
        raise invalid_field(f"{path}.cache_salt", f"must have 1 to {_MAX_CACHE_SALT} characters")
    if message.HasField("model") and not message.model:
        raise invalid_field(f"{path}.model", "must not be empty; leave it out for the base model")


def check_request_id(request_id: str, path: str) -> None:
    """Check the form of a request id."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise invalid_field(path, "must be 1 to 256 visible ASCII characters without spaces")


def check_abort(request: engine_service_pb2.AbortRequest) -> float | None:
    """Check an AbortRequest and return `remember_unknown_for` in seconds, or None."""
    if not request.request_ids:
        raise invalid_field("request_ids", "must name at least one request; an empty list never means all")
    if len(request.request_ids) > _MAX_ABORT_IDS:
        raise invalid_field("request_ids", f"must name at most {_MAX_ABORT_IDS} requests")
    for position, request_id in enumerate(request.request_ids):
        check_request_id(request_id, f"request_ids[{position}]")
    if not request.HasField("remember_unknown_for"):
        return None
    seconds = positive_seconds(request.remember_unknown_for, "remember_unknown_for")
    if seconds > _MAX_REMEMBER_SECONDS:
        raise invalid_field("remember_unknown_for", "must be at most one hour")
    return seconds


def positive_seconds(duration: Duration, path: str) -> float:
    """Return a duration in seconds, which must be above zero."""
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds <= 0:
        raise invalid_field(path, "must be above zero; leave it out for no limit")
    return seconds


def json_object(text: str, path: str) -> dict[str, Any]:
    """Parse the text of a field that must hold a JSON object without a key given twice.

    What Python's parser takes but the way to the engine process does not is refused: NaN and its like, lone surrogates,
    integers beyond 64 bits.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise invalid_field(path, f"holds the key {key!r} twice")
            result[key] = value
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid_field(path, f"is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid_field(path, "must be a JSON object")
    _check_json(value, path)
    return value


def check_json_object(text: str, path: str) -> None:
    """Check that a text which is passed on as it is holds a JSON object, of whatever content."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_field(path, f"is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid_field(path, "must be a JSON object")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_json(value: dict[str, Any], path: str) -> None:
    level: list[Any] = [value]
    for _ in range(_MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _check_level(outer, path)]
        if not level:
            return
    raise invalid_field(path, f"must nest arrays and objects at most {_MAX_JSON_DEPTH} levels deep")


def _check_level(value: Any, path: str) -> list[Any]:
    """Check the texts and numbers in an array or object and return the arrays and objects in it."""
    inner: list[Any] = []
    for item in (*value, *value.values()) if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            inner.append(item)
        elif isinstance(item, str):
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                raise invalid_field(path, "must not hold half a surrogate pair")
        elif isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise invalid_field(path, "must hold integers from -2^63 to 2^64 - 1 only")
    return inner
