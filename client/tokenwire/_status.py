"""Converts gRPC statuses and their google.rpc details into the client's exceptions."""

from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tokenwire._contract import ERROR_DOMAIN, Reason
from tokenwire._errors import (
    AlreadyExistsError,
    CallCancelledError,
    DeadlineExceededError,
    EngineDeadError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestFailedError,
    ResourceExhaustedError,
    SlowReaderError,
    StatusCode,
    StatusError,
    TokenwireError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnreachableError,
)
from tokenwire._wire import present_seconds, seconds
from tokenwire.v1.error_pb2 import ErrorStatus

# Parsed here and not by grpcio-status, whose releases require the protobuf version that they were generated with.
_DETAILS_KEY = "grpc-status-details-bin"

# In the message of gRPC itself, C core's and Go's, which has no code of its own for it.
_TOO_LARGE = "message larger than max"

CLASS_OF_CODE: dict[StatusCode, type[StatusError]] = {
    StatusCode.OK: StatusError,  # never an error
    StatusCode.CANCELLED: CallCancelledError,
    StatusCode.UNKNOWN: InternalError,
    StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    StatusCode.NOT_FOUND: NotFoundError,
    StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    StatusCode.ABORTED: StatusError,  # not used by tokenwire
    StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    StatusCode.UNIMPLEMENTED: UnimplementedError,
    StatusCode.INTERNAL: InternalError,
    StatusCode.UNAVAILABLE: UnavailableError,
    StatusCode.DATA_LOSS: InternalError,
    StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}

CLASS_OF_REASON: dict[str, type[StatusError]] = {
    Reason.QUEUE_FULL: OverloadedError,
    Reason.QUEUED_TOKENS_LIMIT: OverloadedError,
    Reason.ENGINE_DEAD: EngineDeadError,
    Reason.MESSAGE_TOO_LARGE: MessageTooLargeError,
    Reason.SLOW_READER: SlowReaderError,
    Reason.REQUEST_FAILED: RequestFailedError,
}


def status_error(
    code: StatusCode,
    message: str,
    *,
    reason: str = "",
    field_violations: Sequence[FieldViolation] = (),
    retry_delay: float | None = None,
) -> StatusError:
    """Make the exception of a status, of the class of its reason if there is one, else of its code.

    Args:
        code: the gRPC status code.
        message: what happened and what to do, for people.
        reason: one of `tokenwire.Reason`. "": unknown.
        field_violations: the invalid fields of the request.
        retry_delay: seconds to wait before a retry on the same server. None: a retry there does not help.

    Returns:
        The exception.

    """
    of_code = CLASS_OF_CODE[code]
    of_reason = CLASS_OF_REASON.get(reason, of_code)
    chosen = of_reason if issubclass(of_reason, of_code) else of_code
    return chosen(message, code=code, reason=reason, field_violations=field_violations, retry_delay=retry_delay)


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
    if code is StatusCode.RESOURCE_EXHAUSTED and not reason and _TOO_LARGE in message:
        return MessageTooLargeError(message, code=code)
    if code is StatusCode.UNAVAILABLE and not reason:
        return UnreachableError(f"cannot reach {target}: {message}", target=target)
    return status_error(code, message, reason=reason, field_violations=violations, retry_delay=retry_delay)


def malformed(error: ValueError) -> InternalError:
    """Make the error for a message whose columns do not match. Raise it `from None`."""
    return InternalError(f"the server sent a message that breaks the contract: {error}")


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
