"""Converts between Python values and protobuf messages. A value that cannot be encoded is refused with its field."""

import math
from collections.abc import Iterable, Iterator, Mapping
from reprlib import Repr
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from tokenwire._contract import Reason
from tokenwire._errors import FieldViolation, InvalidArgumentError

_Message = TypeVar("_Message", bound=Message)
_Sequence = TypeVar("_Sequence")

# What protobuf raises for a value that it cannot encode. UnicodeEncodeError is a ValueError.
_REFUSALS = (TypeError, ValueError, OverflowError)

_EXPECTED = {
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_DOUBLE: "a real number",
    FieldDescriptor.TYPE_INT32: "an integer from -2147483648 to 2147483647",
    FieldDescriptor.TYPE_INT64: "an integer from -9223372036854775808 to 9223372036854775807",
    FieldDescriptor.TYPE_STRING: "text that UTF-8 can encode",
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 4294967295",
}

_NANOS = 1_000_000_000
_MAX_DURATION = 315_576_000_000.0  # seconds, about 10,000 years: the maximum of google.protobuf.Duration

_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def build(message_type: type[_Message], path: str, values: Mapping[str, Any]) -> _Message:
    """Build a message from the values that are not None.

    Args:
        message_type: class of the message.
        path: the message's field path in the request, for the errors. "": the request itself.
        values: the fields' values, by name.

    Returns:
        The message.

    Raises:
        InvalidArgumentError: values cannot be encoded, with a violation for each. The server validates the rest.

    """
    present = {name: value for name, value in values.items() if value is not None}
    try:
        # protobuf checks the values in C. Which one is wrong is only looked for after a failure.
        return message_type(**present)
    except _REFUSALS:
        violations = _violations(message_type, path, present)
        raise invalid(*(violations or [FieldViolation(path, "cannot be encoded")])) from None


def invalid(*violations: FieldViolation) -> InvalidArgumentError:
    """Make the error that the server would return for these fields."""
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    return InvalidArgumentError(message, reason=Reason.INVALID_FIELD, field_violations=violations)


def sequence(path: str, value: _Sequence) -> _Sequence | list[Any]:
    """Return a sequence of ids. Refuses text and bytes: they are sequences, but never the intended ones.

    An iterator becomes a list: it can be read only once, and is read again to find the element that is wrong.
    """
    if type(value) is list:
        return value
    if isinstance(value, str | bytes):
        raise invalid(FieldViolation(path, f"must be a sequence, not {_repr.repr(value)}"))
    return list(value) if isinstance(value, Iterator) else value


def check_type(path: str, value: object, expected: type) -> None:
    """Check the type of a value: a dict in place of SamplingParams, for example, is refused.

    Args:
        path: the value's field path in the request, for the error.
        value: the value.
        expected: the type that it must have.

    Raises:
        InvalidArgumentError: the value has another type.

    """
    if not isinstance(value, expected):
        raise invalid(FieldViolation(path, f"must be {expected.__name__}, not {_repr.repr(value)}"))


def elements(path: str, value: Iterable[Any], expected: str) -> list[Any]:
    """Return the elements of a sequence.

    Args:
        path: the sequence's field path in the request, for the error.
        value: the sequence.
        expected: what the elements should be, for the error.

    Returns:
        The elements.

    Raises:
        InvalidArgumentError: the value is text, or cannot be iterated.

    """
    try:
        return list(sequence(path, value))
    except TypeError:
        raise invalid(FieldViolation(path, f"must be a sequence of {expected}, not {_repr.repr(value)}")) from None


def duration(path: str, value: float | None) -> Duration | None:
    """Convert seconds to a Duration. Raises InvalidArgumentError if the value is not a number of seconds."""
    if value is None:
        return None
    try:
        number = float(value)
    except _REFUSALS:
        number = math.nan
    if not abs(number) <= _MAX_DURATION:
        raise invalid(FieldViolation(path, f"must be a number of seconds, not {_repr.repr(value)}"))
    # Rounding the fraction alone keeps its digits if the number of seconds is large. Both parts have the same sign.
    fraction, whole = math.modf(number)
    nanos = round(fraction * _NANOS)
    if abs(nanos) == _NANOS:
        whole, nanos = whole + math.copysign(1, nanos), 0
    return Duration(seconds=int(whole), nanos=nanos)


def seconds(value: Duration) -> float:
    """Convert a Duration to seconds."""
    return value.seconds + value.nanos / _NANOS


def present(message: Message, name: str) -> Any:
    """Return a field's value, None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def present_seconds(message: Message, name: str) -> float | None:
    """Return a Duration field in seconds, None if it is not set."""
    return seconds(getattr(message, name)) if message.HasField(name) else None


def optional(cls: type[msgspec.Struct], message: Message) -> dict[str, Any]:
    """Return the message's fields with presence, by name: the fields of `cls` whose default is None."""
    return {field.name: present(message, field.name) for field in msgspec.structs.fields(cls) if field.default is None}


def _violations(message_type: type[Message], path: str, values: Mapping[str, Any]) -> list[FieldViolation]:
    """Return a violation for each field that protobuf refuses."""
    found = []
    for name, value in values.items():
        if _refused(message_type, name, value):
            found.append(_violation(message_type, path, name, value))
    return found


def _violation(message_type: type[Message], path: str, name: str, value: Any) -> FieldViolation:
    """Describe what is wrong with a field, or with one element of it."""
    field = message_type.DESCRIPTOR.fields_by_name[name]
    entry = field.message_type
    place = f"{path}.{name}" if path else name
    if entry is not None and entry.GetOptions().map_entry:
        key_type, value_type = entry.fields_by_name["key"].type, entry.fields_by_name["value"].type
        expected = f"a mapping of {_EXPECTED[key_type]} to {_EXPECTED[value_type]}"
        for key, item in value.items() if isinstance(value, Mapping) else ():
            if _refused(message_type, name, {key: item}):
                value = {key: item}
                break
    else:
        expected = _EXPECTED.get(field.type, "a message")
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if _refused(message_type, name, [item]):
                    place, value = f"{place}[{index}]", item
                    break
    return FieldViolation(place, f"must be {expected}, not {_repr.repr(value)}")


def _refused(message_type: type[Message], name: str, value: Any) -> bool:
    try:
        message_type(**{name: value})
    except _REFUSALS:
        return True
    return False
