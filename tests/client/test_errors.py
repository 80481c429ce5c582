import ast
import inspect
import pickle
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

import tokenwire
from tokenwire import Reason, StatusCode
from tokenwire._status import CLASS_OF_CODE, CLASS_OF_REASON

Serve = Callable[..., Awaitable[str]]

# Only a status, as sent by gRPC itself and by proxies.
PLAIN = {
    "CANCELLED": tokenwire.CallCancelledError,
    "UNKNOWN": tokenwire.InternalError,
    "INVALID_ARGUMENT": tokenwire.InvalidArgumentError,
    "DEADLINE_EXCEEDED": tokenwire.DeadlineExceededError,
    "NOT_FOUND": tokenwire.NotFoundError,
    "ALREADY_EXISTS": tokenwire.AlreadyExistsError,
    "PERMISSION_DENIED": tokenwire.PermissionDeniedError,
    "RESOURCE_EXHAUSTED": tokenwire.ResourceExhaustedError,
    "FAILED_PRECONDITION": tokenwire.FailedPreconditionError,
    "ABORTED": tokenwire.StatusError,
    "OUT_OF_RANGE": tokenwire.InvalidArgumentError,
    "UNIMPLEMENTED": tokenwire.UnimplementedError,
    "INTERNAL": tokenwire.InternalError,
    "UNAVAILABLE": tokenwire.UnreachableError,
    "DATA_LOSS": tokenwire.InternalError,
    "UNAUTHENTICATED": tokenwire.UnauthenticatedError,
}


async def refusal(
    serve: Serve, code: grpc.StatusCode, message: str = "no", *details: Any, raw: bytes | None = None
) -> tokenwire.TokenwireError:
    """Return the error of a call that a server ends with this status."""

    async def info(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        trailer = raw
        if details:
            packed = [AnyMessage() for _ in details]
            for any_message, detail in zip(packed, details, strict=True):
                any_message.Pack(detail)
            trailer = status_pb2.Status(code=code.value[0], message=message, details=packed).SerializeToString()
        metadata = () if trailer is None else (("grpc-status-details-bin", trailer),)
        await context.abort(code, message, metadata)

    async with tokenwire.AsyncClient(await serve(GetEngineInfo=info)) as client:
        with pytest.raises(tokenwire.TokenwireError) as caught:
            await client.engine_info(timeout=10)
    assert caught.value.__cause__ is None
    return caught.value


def error_info(reason: str, domain: str = "tokenwire.v1") -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_every_plain_status(serve: Serve, code: grpc.StatusCode) -> None:
    error = await refusal(serve, code, "says why")
    assert type(error) is PLAIN[code.name]
    assert "says why" in str(error)
    if isinstance(error, tokenwire.StatusError):
        assert error.code == code.value[0]
        assert error.code.name == code.name
        assert (error.message, error.reason, error.field_violations, error.retry_delay) == ("says why", "", (), None)
    assert error.is_retry_safe == (code is grpc.StatusCode.UNAVAILABLE)


def test_the_tables_are_whole() -> None:
    assert {code.name for code in StatusCode} == {code.name for code in grpc.StatusCode}
    assert set(CLASS_OF_CODE) == set(StatusCode)
    assert set(CLASS_OF_REASON) <= set(Reason)


OF_REASON: dict[str, tuple[str, type[tokenwire.StatusError]]] = {
    Reason.INVALID_FIELD: ("INVALID_ARGUMENT", tokenwire.InvalidArgumentError),
    Reason.UNKNOWN_MODEL: ("NOT_FOUND", tokenwire.NotFoundError),
    Reason.DUPLICATE_REQUEST_ID: ("ALREADY_EXISTS", tokenwire.AlreadyExistsError),
    Reason.TOKENIZER_REQUIRED: ("FAILED_PRECONDITION", tokenwire.FailedPreconditionError),
    Reason.ENGINE_ASLEEP: ("FAILED_PRECONDITION", tokenwire.FailedPreconditionError),
    Reason.UNSUPPORTED_FIELD: ("UNIMPLEMENTED", tokenwire.UnimplementedError),
    Reason.UNSUPPORTED_METHOD: ("UNIMPLEMENTED", tokenwire.UnimplementedError),
    Reason.ENGINE_LOADING: ("UNAVAILABLE", tokenwire.UnavailableError),
    Reason.QUEUE_FULL: ("UNAVAILABLE", tokenwire.OverloadedError),
    Reason.QUEUED_TOKENS_LIMIT: ("UNAVAILABLE", tokenwire.OverloadedError),
    Reason.ENGINE_PAUSED: ("UNAVAILABLE", tokenwire.UnavailableError),
    Reason.DRAINING: ("UNAVAILABLE", tokenwire.UnavailableError),
    Reason.ENGINE_DEAD: ("UNAVAILABLE", tokenwire.EngineDeadError),
    Reason.MESSAGE_TOO_LARGE: ("RESOURCE_EXHAUSTED", tokenwire.MessageTooLargeError),
    Reason.SLOW_READER: ("RESOURCE_EXHAUSTED", tokenwire.SlowReaderError),
    Reason.DEADLINE_EXCEEDED: ("DEADLINE_EXCEEDED", tokenwire.DeadlineExceededError),
    Reason.REQUEST_FAILED: ("INTERNAL", tokenwire.RequestFailedError),
    Reason.INTERNAL: ("INTERNAL", tokenwire.InternalError),
    Reason.UNAUTHENTICATED: ("UNAUTHENTICATED", tokenwire.UnauthenticatedError),
    Reason.PERMISSION_DENIED: ("PERMISSION_DENIED", tokenwire.PermissionDeniedError),
    Reason.HANDLE_IN_USE: ("ALREADY_EXISTS", tokenwire.AlreadyExistsError),
    Reason.UNKNOWN_HANDLE: ("NOT_FOUND", tokenwire.NotFoundError),
}


@pytest.mark.parametrize("reason", Reason)
async def test_every_reason_raises_its_class(serve: Serve, reason: Reason) -> None:
    code, expected = OF_REASON[reason]
    error = await refusal(serve, grpc.StatusCode[code], "no", error_info(reason))
    assert type(error) is expected
    assert isinstance(error, tokenwire.StatusError)
    assert (error.code.name, error.reason) == (code, reason)


# Where a request may be sent again. Everything else: nowhere.
RETRIES = {
    "overloaded": (tokenwire.OverloadedError("no", retry_delay=1.0), (True, True)),
    "loading": (tokenwire.UnavailableError("no", retry_delay=1.0), (True, True)),
    "draining": (tokenwire.UnavailableError("no"), (False, True)),
    "dead": (tokenwire.EngineDeadError("no"), (False, True)),
    "dead_with_a_delay": (tokenwire.EngineDeadError("no", retry_delay=1.0), (False, True)),
    "unreachable": (tokenwire.UnreachableError("no"), (True, True)),
    "advised": (tokenwire.StatusError("no", retry_delay=1.0), (True, False)),
    "invalid": (tokenwire.InvalidArgumentError("no"), (False, False)),
    "failed": (tokenwire.RequestFailedError("no"), (False, False)),
    "deadline": (tokenwire.DeadlineExceededError("no"), (False, False)),
    "closed": (tokenwire.ClientClosedError("no"), (False, False)),
}


@pytest.mark.parametrize("case", RETRIES)
def test_where_to_retry(case: str) -> None:
    """FAULTS D10."""
    error, expected = RETRIES[case]
    assert (error.retry_here, error.retry_elsewhere) == expected
    assert error.is_retry_safe == any(expected)


def test_every_reason_is_described_with_its_status() -> None:
    """Programs branch on the reason; its description names the status that comes with it."""
    tree = ast.parse(inspect.getsource(sys.modules[Reason.__module__]))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Reason"]
    members = [(node, body[i + 1]) for i, node in enumerate(body) if isinstance(node, ast.Assign)]
    described = {
        ast.literal_eval(member.value): re.findall(r"\b[A-Z_]{5,}\b", ast.literal_eval(text.value))
        for member, text in members
        if isinstance(text, ast.Expr)
    }
    assert described == {reason: [code] for reason, (code, _) in OF_REASON.items()}


@pytest.mark.parametrize("reason", ["A_LATER_REASON", *CLASS_OF_REASON])
async def test_a_reason_never_leads_outside_its_status(serve: Serve, reason: str) -> None:
    error = await refusal(serve, grpc.StatusCode.NOT_FOUND, "no", error_info(reason))
    assert type(error) is tokenwire.NotFoundError
    assert error.reason == reason


async def test_details(serve: Serve) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="input.model", description="too odd")
    error = await refusal(
        serve,
        grpc.StatusCode.INVALID_ARGUMENT,
        "no",
        error_details_pb2.DebugInfo(detail="unknown to the client"),
        error_info("INVALID_FIELD"),
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
    )
    assert isinstance(error, tokenwire.InvalidArgumentError)
    assert error.field_violations == (tokenwire.FieldViolation("input.model", "too odd"),)
    assert error.retry_delay == 1.5
    assert error.is_retry_safe
    assert str(error) == "INVALID_ARGUMENT (INVALID_FIELD): no"


async def test_foreign_reason_is_not_ours(serve: Serve) -> None:
    error = await refusal(serve, grpc.StatusCode.UNAVAILABLE, "no upstream", error_info("DRAINING", "proxy.example"))
    assert type(error) is tokenwire.UnreachableError


async def test_broken_details_leave_the_status(serve: Serve) -> None:
    error = await refusal(serve, grpc.StatusCode.NOT_FOUND, "no", raw=b"\xff\xff\xff")
    assert type(error) is tokenwire.NotFoundError


def all_errors(root: type[tokenwire.TokenwireError]) -> list[type[tokenwire.TokenwireError]]:
    """The classes of the base install. tokenwire.text has more."""
    children = [child for child in root.__subclasses__() if child.__module__ == root.__module__]
    return [root, *(error for child in children for error in all_errors(child))]


@pytest.mark.parametrize("cls", all_errors(tokenwire.TokenwireError))
def test_errors_are_public_drawn_and_survive_pickling(cls: type[tokenwire.TokenwireError]) -> None:
    assert getattr(tokenwire, cls.__name__) is cls
    assert cls.__name__ in (tokenwire._errors.__doc__ or "")
    assert not issubclass(cls, grpc.RpcError)
    error = cls("why")
    if isinstance(error, tokenwire.StatusError):
        error = type(error)("why", reason="R", field_violations=[tokenwire.FieldViolation("f", "d")], retry_delay=1.0)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is cls
    assert (str(copy), vars(copy)) == (str(error), vars(error))
