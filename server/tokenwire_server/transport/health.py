"""The standard health service."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # it ships no types
    """`grpc.health.v1.Health`.

    It differs from grpcio-health-checking's servicer in that it has `List`, and in that watches end when the server stops
    instead of holding it up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, health_pb2.HealthCheckResponse] = {}
        self._is_closed = False
        self._changed = asyncio.Event()
        """Set at the next change, and replaced."""

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set the status of a service and notify its watchers."""
        self._statuses[service] = _Response(status=status)
        await super().set(service, status)
        self._notify()

    def close(self) -> None:
        """End all watches with OK, after the current status. Safe to repeat."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Watch(  # noqa: N802  # the name is in the standard
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Send the status of a service, and every change of it, until the server stops."""
        sent: health_pb2.HealthCheckResponse | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _Response(status=_Response.SERVICE_UNKNOWN))
            if status != sent:
                await context.write(status)
                sent = status
            elif self._is_closed:
                return
            else:
                await changed.wait()

    async def List(  # noqa: N802  # the name is in the standard
        self,
        request: health_pb2.HealthListRequest,  # noqa: ARG002  # an empty message
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002  # required by the signature
    ) -> health_pb2.HealthListResponse:
        """Return the status of every service."""
        return health_pb2.HealthListResponse(statuses=self._statuses)
