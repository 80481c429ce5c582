"""Converts gRPC statuses and their google.rpc details into the client's exceptions."""

from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tokenwire._contract import ERROR_DOMAIN
from tokenwire._errors import FieldViolation, StatusCode, StatusError, TokenwireError, UnreachableError, status_error
from tokenwire._wire import present_seconds, seconds
from tokenwire.v1.error_pb2 import ErrorStatus

# Parsed here and not by grpcio-status, whose releases require the protobuf version that they were generated with.
_DETAILS_KEY = "grpc-status-details-bin"


def error_from_call(error: grpc.aio.AioRpcError, target: str) -> TokenwireError:
    """Convert a gRPC error. Raise the result `from None`: the gRPC error has no further information."""
    code = StatusCode(error.code().value[0])
    message = error.details() or "no message"
    reason = ""
    violations: list[FieldViolation] = []
    retry_delay = None
    for detail in _details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            # A proxy's reason may have the same name and another meaning.
            if info.domain == ERROR_DOMAIN:
                reason = info.reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest.FromString(detail.value)
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry_delay = seconds(error_details_pb2.RetryInfo.FromString(detail.value).retry_delay)
    # A tokenwire server always sends a reason, so this status is from gRPC itself or from a proxy without a backend.
    if code is StatusCode.UNAVAILABLE and not reason:
        return UnreachableError(f"cannot reach {target}: {message}", target=target)
    return status_error(code, message, reason=reason, field_violations=violations, retry_delay=retry_delay)


def error_from_status(status: ErrorStatus) -> StatusError:
    """Convert the status of one request of a Multiplex stream into the exception of a separate call."""
    try:
        code = StatusCode(status.code)
    except ValueError:
        code = StatusCode.UNKNOWN  # from a newer gRPC
    return status_error(
        code,
        status.message or "no message",
        reason=status.reason,
        # The path that the field has in a separate call.
        field_violations=[
            FieldViolation(violation.field.removeprefix("submit."), violation.description)
            for violation in status.field_violations
        ],
        retry_delay=present_seconds(status, "retry_delay"),
    )


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    """Return the google.rpc details of a status; empty if it has none or they cannot be parsed."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
