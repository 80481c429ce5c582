"""The standard health service."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # it ships no types
    """`grpc.health.v1.Health` with its newest method too, which the package's servicer leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[str, health_pb2.HealthCheckResponse] = {}

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Tell a service's callers and watchers its status."""
        self._listed[service] = health_pb2.HealthCheckResponse(status=status)
        await super().set(service, status)

    async def List(  # noqa: N802  # named by the standard
        self,
        request: health_pb2.HealthListRequest,  # noqa: ARG002  # it is empty
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002  # not needed
    ) -> health_pb2.HealthListResponse:
        """Say the status of each service."""
        return health_pb2.HealthListResponse(statuses=self._listed)
