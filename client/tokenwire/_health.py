"""The standard health service, grpc.health.v1, without grpcio-health-checking.

Each release of that package requires the protobuf version that it was generated with, which would pin protobuf for all
users of the client. The two messages of the service have one field each, number 1: a string in the request, an enum in
the response. On the wire they equal protobuf's wrappers.
"""

# A timeout here is the gRPC deadline, which the server sees too; asyncio.timeout would not do.
# ruff: noqa: ASYNC109

import asyncio
from enum import StrEnum

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from tokenwire._call_stream import CallStream
from tokenwire._connection import Connection, Metadata
from tokenwire._contract import Reason
from tokenwire._errors import DeadlineExceededError, NotFoundError, UnavailableError, UnreachableError

_CHECK = "/grpc.health.v1.Health/Check"
_WATCH = "/grpc.health.v1.Health/Watch"

# Seconds between attempts of wait_ready. How often gRPC really connects is up to its own reconnect backoff.
_RETRY_DELAY = 0.2


class HealthStatus(StrEnum):
    """Health status of a service."""

    UNKNOWN = "unknown"
    """The server does not know, or returned a status that this client does not know."""
    SERVING = "serving"
    """The service accepts requests."""
    NOT_SERVING = "not_serving"
    """The engine is loading the model or has died, or the server is shutting down."""
    SERVICE_UNKNOWN = "service_unknown"
    """The server has no service with that name."""


_STATUSES = {1: HealthStatus.SERVING, 2: HealthStatus.NOT_SERVING, 3: HealthStatus.SERVICE_UNKNOWN}


class AsyncHealthWatch(CallStream[HealthStatus]):
    """Iterates over a service's health status: the present one, then each change.

        async with client.watch_health() as statuses:
            async for status in statuses:
                router.set_available(status is tokenwire.HealthStatus.SERVING)

    It ends with the connection, by an error, and when the server has shut down: to watch a server that restarts, call
    `watch_health` again. Leaving its `async with` block or `aclose()` ends the call. Only one task may read at a time.
    """

    def __init__(self, connection: Connection, service: str, timeout: float | None, metadata: Metadata | None) -> None:
        """Start to watch.

        Args:
            connection: the connection to the server.
            service: full name of the gRPC service. "": the server as a whole.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of the call, sent after the client's own. None: nothing is added.

        Raises:
            ClientClosedError: the client is closed.
            InvalidArgumentError: the metadata cannot be sent.

        """
        method = connection.channel.unary_stream(_WATCH, StringValue.SerializeToString, Int32Value.FromString)
        super().__init__(connection, connection.start(method, StringValue(value=service), timeout, metadata))

    def _convert(self, message: Int32Value) -> HealthStatus:
        return _status(message)


async def health(
    connection: Connection, service: str, timeout: float | None, metadata: Metadata | None
) -> HealthStatus:
    """Return a service's health status.

    Args:
        connection: the connection to the server.
        service: full name of the gRPC service. "": the server as a whole.
        timeout: the call's gRPC deadline, in seconds. None: no deadline.
        metadata: metadata of the call, sent after the client's own. None: nothing is added.

    Returns:
        The status; SERVICE_UNKNOWN if the server has no such service.

    Raises:
        TokenwireError: the call failed.

    """
    method = connection.channel.unary_unary(_CHECK, StringValue.SerializeToString, Int32Value.FromString)
    try:
        response = await connection.unary(method, StringValue(value=service), timeout, metadata)
    except NotFoundError:
        return HealthStatus.SERVICE_UNKNOWN
    return _status(response)


async def wait_ready(connection: Connection, service: str, timeout: float | None, metadata: Metadata | None) -> None:
    """Return when the service is SERVING. Retries while connections are refused or break.

    Args:
        connection: the connection to the server.
        service: full name of the gRPC service. "": the server as a whole.
        timeout: maximum number of seconds to wait. None: no limit.
        metadata: metadata of each attempt, sent after the client's own. None: nothing is added.

    Raises:
        DeadlineExceededError: the service was not SERVING in time.
        TokenwireError: a call failed for a reason that waiting does not cure.

    """
    last, unreachable = "no answer", None
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    async with AsyncHealthWatch(connection, service, None, metadata) as statuses:
                        async for status in statuses:
                            if status is HealthStatus.SERVING:
                                return
                            last, unreachable = f"its status is {status.name}", None
                except (UnreachableError, UnavailableError) as error:
                    last, unreachable = str(error), error
                await asyncio.sleep(_RETRY_DELAY)
    except TimeoutError:
        message = f"{connection.target} is not ready after {timeout:g} s: {last}"
        raise DeadlineExceededError(message, reason=Reason.DEADLINE_EXCEEDED) from unreachable


def _status(response: Int32Value) -> HealthStatus:
    return _STATUSES.get(response.value, HealthStatus.UNKNOWN)
