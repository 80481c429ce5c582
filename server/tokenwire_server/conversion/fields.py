"""Validation of single fields, for all request messages."""

import re

from google.protobuf.duration_pb2 import Duration

from tokenwire_server.errors import invalid_field

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


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
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds <= 0:
        raise invalid_field(path, "must be greater than zero; leave it unset for no limit")
    return seconds
