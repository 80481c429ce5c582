"""Maps errors to gRPC statuses; no other module does.

Code that refuses or fails a request raises a `RequestError` with a `Reason`. The table below maps each reason to its
status code; `to_status` adds the google.rpc details: ErrorInfo always, BadRequest if a field is invalid, RetryInfo if
a retry of the same request can succeed.
"""

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tokenwire._contract import ERROR_DOMAIN, Reason

logger = logging.getLogger(__name__)

_RETRY_DELAY = 1.0
"""Seconds to wait before a retry, for reasons where a retry can succeed."""
_MAX_TEXT = 500
"""Maximum bytes of a text that may quote the request: gRPC drops a status too large for the trailing metadata."""


class _Row(NamedTuple):
    code: grpc.StatusCode
    retry: bool = False


_TABLE: dict[Reason, _Row] = {
    Reason.INVALID_FIELD: _Row(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.UNKNOWN_MODEL: _Row(grpc.StatusCode.NOT_FOUND),
    Reason.DUPLICATE_REQUEST_ID: _Row(grpc.StatusCode.ALREADY_EXISTS),
    Reason.TOKENIZER_REQUIRED: _Row(grpc.StatusCode.FAILED_PRECONDITION),
    Reason.ENGINE_ASLEEP: _Row(grpc.StatusCode.FAILED_PRECONDITION),
    Reason.UNSUPPORTED_FIELD: _Row(grpc.StatusCode.UNIMPLEMENTED),
    Reason.UNSUPPORTED_METHOD: _Row(grpc.StatusCode.UNIMPLEMENTED),
    Reason.ENGINE_LOADING: _Row(grpc.StatusCode.UNAVAILABLE, retry=True),
    Reason.QUEUE_FULL: _Row(grpc.StatusCode.UNAVAILABLE, retry=True),
    Reason.QUEUED_TOKENS_LIMIT: _Row(grpc.StatusCode.UNAVAILABLE, retry=True),
    Reason.ENGINE_PAUSED: _Row(grpc.StatusCode.UNAVAILABLE, retry=True),
    Reason.DRAINING: _Row(grpc.StatusCode.UNAVAILABLE),
    Reason.ENGINE_DEAD: _Row(grpc.StatusCode.UNAVAILABLE),
    Reason.MESSAGE_TOO_LARGE: _Row(grpc.StatusCode.RESOURCE_EXHAUSTED),
    Reason.SLOW_READER: _Row(grpc.StatusCode.RESOURCE_EXHAUSTED),
    Reason.DEADLINE_EXCEEDED: _Row(grpc.StatusCode.DEADLINE_EXCEEDED),
    Reason.REQUEST_FAILED: _Row(grpc.StatusCode.INTERNAL),
    Reason.INTERNAL: _Row(grpc.StatusCode.INTERNAL),
    Reason.UNAUTHENTICATED: _Row(grpc.StatusCode.UNAUTHENTICATED),
    Reason.PERMISSION_DENIED: _Row(grpc.StatusCode.PERMISSION_DENIED),
    Reason.HANDLE_IN_USE: _Row(grpc.StatusCode.ALREADY_EXISTS),
    Reason.UNKNOWN_HANDLE: _Row(grpc.StatusCode.NOT_FOUND),
}


class Violation(NamedTuple):
    """An invalid field."""

    field: str
    """Path of the field in the request message, for example "input.sampling_params.top_p"."""
    description: str
    """What a valid value is, or why this one is invalid."""


class RequestError(Exception):
    """A request that is refused or has failed; everything in it is sent to the caller."""

    def __init__(self, reason: Reason, message: str, violations: Sequence[Violation] = ()) -> None:
        """Make an error.

        Args:
            reason: the reason, which determines the status code.
            message: the status message; truncated if it is too long for the trailing metadata.
            violations: the invalid fields.

        """
        message = _shorten(message)
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.violations = tuple(Violation(field, _shorten(description)) for field, description in violations)

    @property
    def code(self) -> grpc.StatusCode:
        """The status code of the error's reason."""
        return _TABLE[self.reason].code

    @property
    def retry_delay(self) -> float | None:
        """Seconds to wait before a retry of the same request; None if it cannot succeed on this server."""
        return _RETRY_DELAY if _TABLE[self.reason].retry else None


def _shorten(text: str) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= _MAX_TEXT else encoded[:_MAX_TEXT].decode(errors="ignore") + "..."


def invalid_field(field: str, description: str) -> RequestError:
    """Return the error for a field with an invalid value."""
    return RequestError(Reason.INVALID_FIELD, f"{field}: {description}", (Violation(field, description),))


def unsupported_field(field: str, description: str) -> RequestError:
    """Return the error for a field that this server or its engine does not support."""
    return RequestError(Reason.UNSUPPORTED_FIELD, f"{field}: {description}", (Violation(field, description),))


def engine_dead() -> RequestError:
    """Return the error of every request once the engine has died."""
    return RequestError(Reason.ENGINE_DEAD, "the engine has died; send the request to another engine")


def internal_error() -> RequestError:
    """Return the error for a bug of the server: the cause may hold paths or prompts, so it goes to the log alone."""
    return RequestError(Reason.INTERNAL, "internal error; see the server's log")


def to_status(error: RequestError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error."""
    number: int = error.code.value[0]
    status = status_pb2.Status(code=number, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    status.details.add().Pack(info)
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for field, description in error.violations:
            bad_request.field_violations.add(field=field, description=description)
        status.details.add().Pack(bad_request)
    if (delay := error.retry_delay) is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(delay * 1e9))
        status.details.add().Pack(retry)
    return status


class boundary:  # noqa: N801  # used as a keyword: `async with errors.boundary(context, "Generate"):`
    """Aborts a call with the status of any error raised in its block.

    Cancellation and GeneratorExit pass through.
    """

    __slots__ = ("_context", "_method")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        self._context = context
        self._method = method

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return
        if not isinstance(error, RequestError):
            # An unexpected exception's text may contain paths or prompts: it is logged, never sent to the caller.
            logger.error("%s failed unexpectedly", self._method, exc_info=error)
            error = internal_error()
        await self._context.abort_with_status(rpc_status.to_status(to_status(error)))
