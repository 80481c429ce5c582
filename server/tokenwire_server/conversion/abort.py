"""Validation of AbortRequest."""

from tokenwire.v1.engine_service_pb2 import AbortRequest
from tokenwire_server.conversion.fields import check_request_id, positive_seconds
from tokenwire_server.errors import invalid_field

_MAX_IDS = 10_000
"""Maximum number of ids in one AbortRequest, as in the contract."""
_MAX_REMEMBER_SECONDS = 3600.0
"""Maximum of `remember_unknown_for`, as in the contract."""


def check_abort(request: AbortRequest) -> float | None:
    """Check an AbortRequest.

    Returns:
        `remember_unknown_for` in seconds; None if it is not set.

    Raises:
        RequestError: INVALID_FIELD.

    """
    if not request.request_ids:
        raise invalid_field("request_ids", "must contain at least one id; an empty list does not mean all requests")
    if len(request.request_ids) > _MAX_IDS:
        raise invalid_field("request_ids", f"must contain at most {_MAX_IDS} ids")
    for position, request_id in enumerate(request.request_ids):
        check_request_id(request_id, f"request_ids[{position}]")
    if not request.HasField("remember_unknown_for"):
        return None
    seconds = positive_seconds(request.remember_unknown_for, "remember_unknown_for")
    if seconds > _MAX_REMEMBER_SECONDS:
        raise invalid_field("remember_unknown_for", "must be at most one hour")
    return seconds
