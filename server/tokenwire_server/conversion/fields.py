"""Validation of single fields, for all request messages."""

import re
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from tokenwire._contract import Reason
from tokenwire_server.errors import RequestError, Violation, invalid_field

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_MAX_SECONDS = 315_576_000_000
"""Maximum seconds of a google.protobuf.Duration, 10,000 years: duration.proto. The runtime does not enforce it."""
_MAX_NANOS = 999_999_999
"""Maximum nanoseconds of a google.protobuf.Duration, likewise."""
_MAX_QUOTED = 200
"""Maximum number of characters of a value from the request that an error message quotes."""


def quoted(text: str) -> str:
    """Return a value from the request as an error message quotes it: escaped, and truncated if it is long."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")


def conflict(fields: Sequence[str], description: str) -> RequestError:
    """Return the error for fields whose values cannot be combined.

    Args:
        fields: paths of the fields in the request message, the first of which the status message names.
        description: why the values cannot be combined.

    """
    violations = [Violation(field, description) for field in fields]
    return RequestError(Reason.INVALID_FIELD, f"{fields[0]}: {description}", violations)


def check_request_id(request_id: str, path: str) -> None:
    """Check the form of a request id.

    Raises:
        RequestError: INVALID_FIELD.

    """
    if not _REQUEST_ID.fullmatch(request_id):
        raise invalid_field(path, "must be 1 to 256 visible ASCII characters without spaces")


def positive_seconds(duration: Duration, path: str) -> float:
    """Convert a duration that must be greater than zero.

    Args:
        duration: the field's value.
        path: path of the field in the request message, for errors.

    Returns:
        The duration in seconds.

    Raises:
        RequestError: INVALID_FIELD.

    """
    seconds, nanos = duration.seconds, duration.nanos
    if not (0 <= seconds <= _MAX_SECONDS and 0 <= nanos <= _MAX_NANOS):
        raise invalid_field(
            path, f"must have seconds in [0, {_MAX_SECONDS}] and nanos in [0, {_MAX_NANOS}], got {seconds} and {nanos}"
        )
    if not seconds and not nanos:
        raise invalid_field(path, "must be greater than zero; leave it unset for no limit")
    return seconds + nanos / 1e9
