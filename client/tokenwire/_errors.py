"""The client's exceptions. It never raises one of gRPC's.

    TokenwireError                  base class
    ├── ClientClosedError           the client was closed before or during the call
    ├── UnreachableError            no connection to the server, or it broke
    └── StatusError                 a status other than OK, with reason and details
        ├── InvalidArgumentError
        ├── UnauthenticatedError
        ├── PermissionDeniedError
        ├── NotFoundError           no model or adapter with that name
        ├── AlreadyExistsError      a live request already has that id
        ├── FailedPreconditionError
        ├── UnimplementedError      a field or method that the server does not support
        ├── ResourceExhaustedError
        │   ├── MessageTooLargeError
        │   └── SlowReaderError
        ├── DeadlineExceededError
        ├── UnavailableError        this server cannot accept the request now; another may
        │   ├── OverloadedError
        │   └── EngineDeadError
        ├── CallCancelledError      cancelled by the server or a proxy
        └── InternalError
            └── RequestFailedError  the engine failed this request only

A cancelled task gets asyncio.CancelledError, as everywhere else.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec


class StatusCode(IntEnum):
    """gRPC status codes, with their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class FieldViolation(msgspec.Struct, frozen=True):
    """A field with an invalid value."""

    field: str
    """Path of the field in the request, "input.sampling_params.top_p" for example."""
    description: str
    """What is wrong with the value and what is accepted."""


class TokenwireError(Exception):
    """Base class of the client's exceptions."""

    @property
    def retry_here(self) -> bool:
        """Whether the same request may succeed on the same server later: after `StatusError.retry_delay` if it is set.

        A stream that broke starts over: the tokens received so far are not continued.
        """
        return False

    @property
    def retry_elsewhere(self) -> bool:
        """Whether the same request may succeed on another server, at once."""
        return False

    @property
    def is_retry_safe(self) -> bool:
        """Whether `retry_here` or `retry_elsewhere` is true."""
        return self.retry_here or self.retry_elsewhere


class ClientClosedError(TokenwireError):
    """The client was closed before or during the call, or was used in another event loop than its own."""


class UnreachableError(TokenwireError):
    """The server could not be reached: nothing listens, the connection timed out or broke, or a proxy has no backend.

    A server aborts the requests of a connection when it notices that the connection is broken. If a host or a network
    has failed silently, its keepalive pings have to time out first: until then the request may run on, and its id is in
    use on that server.
    """

    def __init__(self, message: str, *, target: str = "") -> None:
        super().__init__(message)
        self.target = target
        """The server's address, as passed to the client."""

    @property
    def retry_here(self) -> bool:
        """True: the server may be reachable again. Use a new request id, since the old one may still be in use."""
        return True

    @property
    def retry_elsewhere(self) -> bool:
        """True. If the request had reached this server, it is aborted there as soon as the server notices."""
        return True


class StatusError(TokenwireError):
    """The call ended with a status other than OK. Branch on the class or on `reason`, not on the message."""

    default_code = StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: StatusCode | None = None,
        reason: str = "",
        field_violations: Sequence[FieldViolation] = (),
        retry_delay: float | None = None,
    ) -> None:
        """Make an error.

        Args:
            message: what happened and what to do, for people.
            code: the gRPC status code. None: the default of the class.
            reason: one of `tokenwire.Reason`. "": unknown.
            field_violations: the invalid fields of the request.
            retry_delay: seconds to wait before a retry on the same server. None: a retry there does not help.

        """
        super().__init__(message)
        self.message = message
        """What happened and what to do, for people."""
        self.code = self.default_code if code is None else code
        """The gRPC status code."""
        self.reason = reason
        """Why the call failed: one of `tokenwire.Reason`, or another one from a newer server. Empty if gRPC itself or a
        proxy ended the call."""
        self.field_violations = tuple(field_violations)
        """The invalid fields; empty unless the request is invalid."""
        self.retry_delay = retry_delay
        """Seconds to wait before the same request may be sent to the same server again. None: the server does not
        advise a retry."""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason and self.reason != self.code.name else ""
        return f"{self.code.name}{reason}: {self.message}"

    @property
    def retry_here(self) -> bool:
        """Whether the server advises a retry: `retry_delay` is set."""
        return self.retry_delay is not None


class InvalidArgumentError(StatusError):
    """The request is invalid; see `field_violations`. Raised before the call for values that cannot be encoded."""

    default_code = StatusCode.INVALID_ARGUMENT


class UnauthenticatedError(StatusError):
    """The credential is missing or wrong."""

    default_code = StatusCode.UNAUTHENTICATED


class PermissionDeniedError(StatusError):
    """The credential does not allow this."""

    default_code = StatusCode.PERMISSION_DENIED


class NotFoundError(StatusError):
    """The server has no model or adapter with that name."""

    default_code = StatusCode.NOT_FOUND


class AlreadyExistsError(StatusError):
    """A live request already has that id. It is not affected."""

    default_code = StatusCode.ALREADY_EXISTS


class FailedPreconditionError(StatusError):
    """The server's state or options do not allow this: the engine is asleep or has no tokenizer, for example."""

    default_code = StatusCode.FAILED_PRECONDITION


class UnimplementedError(StatusError):
    """The server does not support a field or method that the call uses."""

    default_code = StatusCode.UNIMPLEMENTED


class ResourceExhaustedError(StatusError):
    """A limit is exceeded, the maximum message size of either side for example."""

    default_code = StatusCode.RESOURCE_EXHAUSTED


class MessageTooLargeError(ResourceExhaustedError):
    """A message is larger than its receiver accepts, or than its sender may send.

    The request exceeds `max_send_message_bytes` or the server's limit, or the response exceeds the server's limit or
    `max_receive_message_bytes`. With the reason MESSAGE_TOO_LARGE, nothing was generated.
    """


class SlowReaderError(ResourceExhaustedError):
    """The caller did not read the stream for too long, and the server ended it."""


class DeadlineExceededError(StatusError):
    """The call's deadline has passed, and the server aborted the request."""

    default_code = StatusCode.DEADLINE_EXCEEDED


class UnavailableError(StatusError):
    """The server accepts no requests now: it is loading the model, draining, paused or overloaded."""

    default_code = StatusCode.UNAVAILABLE

    @property
    def retry_elsewhere(self) -> bool:
        """True: the request is not running here."""
        return True


class OverloadedError(UnavailableError):
    """The maximum number of unfinished requests or queued tokens is reached."""


class EngineDeadError(UnavailableError):
    """The engine has died, and this server does not recover. Retry on another server."""

    @property
    def retry_here(self) -> bool:
        """False, also if a `retry_delay` is set."""
        return False


class CallCancelledError(StatusError):
    """The server or a proxy cancelled the call."""

    default_code = StatusCode.CANCELLED


class InternalError(StatusError):
    """A bug in the server, whose log has the cause, or a fault between client and server."""

    default_code = StatusCode.INTERNAL


class RequestFailedError(InternalError):
    """The engine failed this request. Other requests are not affected."""
