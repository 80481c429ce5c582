"""What the client raises; never an exception of grpc's.

    TokenwireError                  the root
    ├── ClientClosedError           the client was closed before or during the call
    ├── UnreachableError            could not ask: no connection, or it broke
    └── StatusError                 was refused: a status, with reason and details
        ├── InvalidArgumentError
        ├── UnauthenticatedError
        ├── PermissionDeniedError
        ├── NotFoundError           no model or adapter of that name
        ├── AlreadyExistsError      a live request has that id
        ├── FailedPreconditionError
        ├── UnimplementedError      a field or method that this server does not have
        ├── ResourceExhaustedError
        │   ├── MessageTooLargeError
        │   └── SlowReaderError
        ├── DeadlineExceededError
        ├── UnavailableError        this server cannot take it now; another may
        │   ├── OverloadedError
        │   └── EngineDeadError
        ├── CallCancelledError      cancelled by someone other than the caller
        └── InternalError
            └── RequestFailedError  the engine failed this request; others go on

A task that is cancelled sees asyncio.CancelledError, as everywhere else.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from tokenwire._contract import Reason


class StatusCode(IntEnum):
    """The gRPC status codes, by their numbers on the wire."""

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
    """A field with a wrong value."""

    field: str
    """Path of the field in the request, "input.sampling_params.top_p" for example."""
    description: str
    """What is wrong with it and what would be right."""


class TokenwireError(Exception):
    """The root of everything that the client raises on purpose."""

    @property
    def is_retry_safe(self) -> bool:
        """Whether the same request may be sent again and may fare better.

        Wait for `StatusError.retry_delay` where there is one; else another server is the better choice. A stream that
        broke has to start over: its tokens so far are not continued.
        """
        return False


class ClientClosedError(TokenwireError):
    """The client was closed before the call or while it ran."""


class UnreachableError(TokenwireError):
    """No answer of a server: nobody listens, the connection timed out or broke, or a proxy had nowhere to go.

    A server ends all that a broken connection was running.
    """

    def __init__(self, message: str, *, target: str = "") -> None:
        super().__init__(message)
        self.target = target
        """The address that the client was asked to use."""

    @property
    def is_retry_safe(self) -> bool:
        """True: whatever the server had of the request, it has let go of."""
        return True


class StatusError(TokenwireError):
    """The call ended with a status other than OK. Branch on the class or on `reason`, never on the message."""

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
        super().__init__(message)
        self.message = message
        """What happened and what to do, for people."""
        self.code = self.default_code if code is None else code
        """The gRPC status."""
        self.reason = reason
        """Why, as in `tokenwire.Reason`; later servers may send further ones. Empty where a proxy or gRPC itself ended
        the call."""
        self.field_violations = tuple(field_violations)
        """The fields at fault; empty unless the request was at fault."""
        self.retry_delay = retry_delay
        """Seconds to wait before the same request may be sent to the same server again; None where the server does not
        say that this helps."""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason and self.reason != self.code.name else ""
        return f"{self.code.name}{reason}: {self.message}"

    @property
    def is_retry_safe(self) -> bool:
        """Whether the server said that sending the same request again helps."""
        return self.retry_delay is not None


class InvalidArgumentError(StatusError):
    """The request is wrong; `field_violations` says where. Also raised before the call, for values that cannot be sent."""

    default_code = StatusCode.INVALID_ARGUMENT


class UnauthenticatedError(StatusError):
    """No credential, or a wrong one."""

    default_code = StatusCode.UNAUTHENTICATED


class PermissionDeniedError(StatusError):
    """The credential does not allow this."""

    default_code = StatusCode.PERMISSION_DENIED


class NotFoundError(StatusError):
    """The server has no model or adapter of that name."""

    default_code = StatusCode.NOT_FOUND


class AlreadyExistsError(StatusError):
    """A live request has that id; it goes on untouched."""

    default_code = StatusCode.ALREADY_EXISTS


class FailedPreconditionError(StatusError):
    """The server's state or start-up options do not allow this: no tokenizer, an engine asleep."""

    default_code = StatusCode.FAILED_PRECONDITION


class UnimplementedError(StatusError):
    """This server does not have a field or a method that the call needs."""

    default_code = StatusCode.UNIMPLEMENTED


class ResourceExhaustedError(StatusError):
    """A limit was passed, the message size of either side for example."""

    default_code = StatusCode.RESOURCE_EXHAUSTED


class MessageTooLargeError(ResourceExhaustedError):
    """The answer would not fit the server's message size limit; nothing was generated."""


class SlowReaderError(ResourceExhaustedError):
    """The stream was not read for too long, so the server ended it."""


class DeadlineExceededError(StatusError):
    """The call's timeout passed; the server has let go of the request."""

    default_code = StatusCode.DEADLINE_EXCEEDED


class UnavailableError(StatusError):
    """The server does not take requests now: it loads, drains or is paused."""

    default_code = StatusCode.UNAVAILABLE

    @property
    def is_retry_safe(self) -> bool:
        """True: the request is not running. After `retry_delay` where set, else elsewhere."""
        return True


class OverloadedError(UnavailableError):
    """The engine's queue is full."""


class EngineDeadError(UnavailableError):
    """The engine has died; this server will not recover by itself."""


class CallCancelledError(StatusError):
    """The server or a proxy cancelled the call."""

    default_code = StatusCode.CANCELLED


class InternalError(StatusError):
    """A bug in the server or a fault between; the server's log has the cause."""

    default_code = StatusCode.INTERNAL


class RequestFailedError(InternalError):
    """The engine ended this request with an error; other requests go on."""


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
    StatusCode.ABORTED: StatusError,  # tokenwire has no use for it
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
    """Build the exception of a status: the code's class, or a narrower one where the reason has one."""
    of_code = CLASS_OF_CODE[code]
    of_reason = CLASS_OF_REASON.get(reason, of_code)
    chosen = of_reason if issubclass(of_reason, of_code) else of_code
    return chosen(message, code=code, reason=reason, field_violations=field_violations, retry_delay=retry_delay)
