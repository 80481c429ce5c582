"""The standard health service."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # it ships no types
    """`grpc.health.v1.Health` with `List`, the newest of its methods, which grpcio-health-checking does not implement."""

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, health_pb2.HealthCheckResponse] = {}

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set the status of a service and notify its watchers."""
        self._statuses[service] = health_pb2.HealthCheckResponse(status=status)
        await super().set(service, status)

    async def List(  # noqa: N802  # the name is in the standard
        self,
        request: health_pb2.HealthListRequest,  # noqa: ARG002  # an empty message
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002  # required by the signature
    ) -> health_pb2.HealthListResponse:
        """Return the status of every service."""
        return health_pb2.HealthListResponse(statuses=self._statuses)
