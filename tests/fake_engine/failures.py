"""What a caller finds out about a failed call."""

from collections.abc import Awaitable
from typing import Any, NamedTuple, Self

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fake_engine.server import within


class Failure(NamedTuple):
    """A status with its google.rpc details."""

    code: grpc.StatusCode
    reason: str
    fields: tuple[str, ...]
    message: str
    domain: str
    descriptions: tuple[str, ...]
    retry_delay: float | None

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Self:
        """Read the details of a call's error; a status without ErrorInfo is a failed test."""
        status = rpc_status.from_call(error)
        assert status is not None, f"a status without details: {error}"
        details: dict[str, Any] = {}
        for packed in status.details:
            for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
                if packed.Is(kind.DESCRIPTOR):
                    detail = details[kind.DESCRIPTOR.name] = kind()
                    packed.Unpack(detail)
        violations = details["BadRequest"].field_violations if "BadRequest" in details else ()
        retry = details["RetryInfo"].retry_delay.ToNanoseconds() / 1e9 if "RetryInfo" in details else None
        return cls(
            error.code(),
            details["ErrorInfo"].reason,
            tuple(violation.field for violation in violations),
            error.details() or "",
            details["ErrorInfo"].domain,
            tuple(violation.description for violation in violations),
            retry,
        )


async def failure_of(call: Awaitable[Any]) -> Failure:
    """Wait for a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(call)
    return Failure.of(caught.value)
