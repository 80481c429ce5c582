"""The standard health service, grpc.health.v1, without grpcio-health-checking.

That package's every release demands a protobuf as new as its own, which would force the version of everyone who
installs the client. Its two messages are on the wire what protobuf's wrappers are, one field with the number 1: a
string in the request, an enum in the response.
"""

# A timeout here is the gRPC deadline, which the server sees too; asyncio.timeout would not do.
# ruff: noqa: ASYNC109

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from enum import StrEnum

import grpc.aio
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from tokenwire._connection import Connection, Metadata
from tokenwire._contract import Reason
from tokenwire._errors import DeadlineExceededError, NotFoundError, UnavailableError, UnreachableError

_CHECK = "/grpc.health.v1.Health/Check"
_WATCH = "/grpc.health.v1.Health/Watch"

# Between attempts of wait_ready; gRPC's own back-off rules how often it really connects.
_RETRY_DELAY = 0.2


class HealthStatus(StrEnum):
    """What a server says of a service."""

    UNKNOWN = "unknown"
    """The server does not know, or says what this client does not know."""
    SERVING = "serving"
    """Requests are taken."""
    NOT_SERVING = "not_serving"
    """The engine loads, has died, or the server shuts down."""
    SERVICE_UNKNOWN = "service_unknown"
    """The server has no service of that name."""


_STATUSES = {1: HealthStatus.SERVING, 2: HealthStatus.NOT_SERVING, 3: HealthStatus.SERVICE_UNKNOWN}


async def health(
    connection: Connection, service: str, timeout: float | None, metadata: Metadata | None
) -> HealthStatus:
    """Ask once."""
    method = connection.channel.unary_unary(_CHECK, StringValue.SerializeToString, Int32Value.FromString)
    try:
        response = await connection.unary(method, StringValue(value=service), timeout, metadata)
    except NotFoundError:
        return HealthStatus.SERVICE_UNKNOWN
    return _status(response)


async def wait_ready(connection: Connection, service: str, timeout: float | None, metadata: Metadata | None) -> None:
    """Return when the service is SERVING, through refused and broken connections."""
    last, unreachable = "no answer", None
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    async with contextlib.aclosing(_watch(connection, service, metadata)) as statuses:
                        async for status in statuses:
                            if status is HealthStatus.SERVING:
                                return
                            last, unreachable = f"it says {status.name}", None
                except (UnreachableError, UnavailableError) as error:
                    last, unreachable = str(error), error
                await asyncio.sleep(_RETRY_DELAY)
    except TimeoutError:
        message = f"{connection.target} is not ready after {timeout:g} s: {last}"
        raise DeadlineExceededError(message, reason=Reason.DEADLINE_EXCEEDED) from unreachable


async def _watch(connection: Connection, service: str, metadata: Metadata | None) -> AsyncGenerator[HealthStatus]:
    method = connection.channel.unary_stream(_WATCH, StringValue.SerializeToString, Int32Value.FromString)
    call = connection.start(method, StringValue(value=service), None, metadata)
    try:
        async for response in call:
            yield _status(response)
    except grpc.aio.AioRpcError as error:
        raise connection.error(error) from None
    except asyncio.CancelledError:
        connection.raise_if_closed()
        raise
    finally:
        call.cancel()


def _status(response: Int32Value) -> HealthStatus:
    return _STATUSES.get(response.value, HealthStatus.UNKNOWN)
