"""From a gRPC error to the client's own: the one place that knows how statuses and their details look on the wire."""

from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tokenwire._contract import ERROR_DOMAIN
from tokenwire._errors import FieldViolation, StatusCode, StatusError, TokenwireError, UnreachableError, status_error
from tokenwire._wire import present_seconds, seconds
from tokenwire.v1.error_pb2 import ErrorStatus

# Read here rather than by grpcio-status, whose every release demands a protobuf as new as its own.
_DETAILS_KEY = "grpc-status-details-bin"


def error_from_call(error: grpc.aio.AioRpcError, target: str) -> TokenwireError:
    """Turn grpc's error into the client's. Raise the result `from None`: grpc's own says no more."""
    code = StatusCode(error.code().value[0])
    message = error.details() or "no message"
    reason = ""
    violations: list[FieldViolation] = []
    retry_delay = None
    for detail in _details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            # A proxy's reasons are not ours, even where they are spelled alike.
            if info.domain == ERROR_DOMAIN:
                reason = info.reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest.FromString(detail.value)
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry_delay = seconds(error_details_pb2.RetryInfo.FromString(detail.value).retry_delay)
    # A tokenwire server always gives a reason, so this is gRPC's or a proxy's word for "nobody there".
    if code is StatusCode.UNAVAILABLE and not reason:
        return UnreachableError(f"cannot reach {target}: {message}", target=target)
    return status_error(code, message, reason=reason, field_violations=violations, retry_delay=retry_delay)


def error_from_status(status: ErrorStatus) -> StatusError:
    """Turn the error of one request of a Multiplex stream into what a call of its own would have raised."""
    try:
        code = StatusCode(status.code)
    except ValueError:
        code = StatusCode.UNKNOWN  # of a later gRPC
    return status_error(
        code,
        status.message or "no message",
        reason=status.reason,
        # The input is where it would be in a call of its own.
        field_violations=[
            FieldViolation(violation.field.removeprefix("submit."), violation.description)
            for violation in status.field_violations
        ],
        retry_delay=present_seconds(status, "retry_delay"),
    )


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    """Give the status's google.rpc details; none where there are none or something between has broken them."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
