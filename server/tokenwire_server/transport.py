"""The gRPC server: options, listening, health and reflection."""

import pathlib
import socket
import stat

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tokenwire.v1 import engine_service_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from tokenwire_server.config import ServerConfig

SERVICE_NAME = engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

_MIN_PING_INTERVAL_MS = 5_000


class BindError(Exception):
    """The address cannot be listened on."""


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_receive_message_bytes),
        ("grpc.max_send_message_length", config.max_send_message_bytes),
        # A second server on the port must fail, not share the callers.
        ("grpc.so_reuseport", 0),
        # A unary call is silent while the engine works: callers' keepalive pings must not count as abuse, which would
        # end the whole connection. The often-copied `min_recv_ping_interval...` is no option and silently ignored.
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Finds callers that vanished without closing, so that their requests leave the engine.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class Transport:
    """The listening server with the standard services beside ours."""

    def __init__(self, config: ServerConfig, servicer: EngineServiceServicer) -> None:
        self._config = config
        self._server = grpc.aio.server(options=_options(config))
        self._health = health.aio.HealthServicer()
        self.address = ""
        """Where the server listens, in gRPC's notation; known after `start`."""
        add_EngineServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._add_reflection()

    def _add_reflection(self) -> None:
        names = (SERVICE_NAME, health.SERVICE_NAME, _REFLECTION_V1, reflection.SERVICE_NAME)
        servicer = reflection.aio.ReflectionServicer(names)
        # grpcio has v1alpha only; v1 has the same messages under another name.
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        for name in (_REFLECTION_V1, reflection.SERVICE_NAME):
            generic = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            self._server.add_generic_rpc_handlers((generic,))

    async def start(self) -> None:
        """Listen, with health NOT_SERVING.

        Raises:
            BindError: the address cannot be listened on.

        """
        await self.set_serving(False)
        address = self._config.address
        if self._config.uds is not None:
            _remove_stale_socket(pathlib.Path(self._config.uds))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise BindError(f"cannot listen on {address}: the address is in use or not one of this machine's") from None
        await self._server.start()
        self.address = address if self._config.uds is not None else f"{address.rpartition(':')[0]}:{port}"

    async def set_serving(self, serving: bool) -> None:  # noqa: FBT001  # the one thing it says
        """Tell health's callers and watchers."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Stop listening, and end what still runs after `grace` seconds."""
        await self._server.stop(grace)
        if self._config.uds is not None:
            _remove(self._config.uds)


def _remove(path: str) -> None:
    pathlib.Path(path).unlink(missing_ok=True)


def _remove_stale_socket(path: pathlib.Path) -> None:
    """Remove the socket of a server that is gone; leave one that answers, and any other file."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise BindError(f"cannot listen on unix:{path}: a file that is no socket is there")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise BindError(f"cannot listen on unix:{path}: another server listens there")
