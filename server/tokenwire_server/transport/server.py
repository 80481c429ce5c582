"""The gRPC server: channel options, listening address, health and reflection."""

import ipaddress
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tokenwire_server.access.interceptor import TokenInterceptor
from tokenwire_server.access.tls import TlsFiles
from tokenwire_server.access.tokens import TokenFile
from tokenwire_server.config import ServerConfig
from tokenwire_server.transport import reflection
from tokenwire_server.transport.handlers import DecodingInterceptor
from tokenwire_server.transport.health import HealthServicer
from tokenwire_server.transport.unix_socket import BindError, UnixSocket

logger = logging.getLogger(__name__)

_OPEN_SERVICES = {
    "health": (health.SERVICE_NAME,),
    "reflection": (reflection.V1, reflection.V1ALPHA),
}
"""Full service names for each value of --open-services."""

_MIN_PING_INTERVAL_MS = 5_000
"""A ping that comes sooner is a strike; gRPC's default of 300,000 ms is far above what clients use."""
_KEEPALIVE_TIME_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 20_000
"""gRPC's own default: how long a ping may stay unanswered before the connection is closed."""


class Service(NamedTuple):
    """A service of the server."""

    name: str
    """Full name, as in health and reflection."""
    add_to: Callable[[grpc.aio.Server], None]
    """Registers its servicer with a server that has not started."""


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_receive_message_bytes),
        ("grpc.max_send_message_length", config.max_send_message_bytes),
        # A second server on the same port must fail instead of sharing the connections.
        ("grpc.so_reuseport", 0),
        # A unary call sends nothing while the engine works. Keepalive pings of clients must not count as ping strikes,
        # which close the connection. `grpc.http2.min_recv_ping_interval_without_data_ms`, which many examples set, does
        # not exist and is silently ignored.
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Detects clients that disappeared without closing the connection, so that their requests are aborted.
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # In grpcio 1.85 a ping that is not answered fails after this time, a minute by default, and not the one above.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class Transport:
    """The gRPC server: the services that it is given, health and reflection."""

    def __init__(self, config: ServerConfig, services: Iterable[Service]) -> None:
        """Create a server that does not listen yet; call `start`.

        Args:
            config: address, TLS, tokens and message size limits.
            services: the services to serve.

        """
        self._config = config
        services = list(services)
        self._names = [service.name for service in services]
        self._socket = None if config.uds is None else UnixSocket(config.uds, config.uds_mode)
        self._tokens = None if config.token_file is None else TokenFile(config.token_file)
        self._server = grpc.aio.server(options=_options(config), interceptors=self._interceptors())
        self._health = HealthServicer()
        self.address = ""
        """Address that the server listens on, in gRPC's notation; set by `start`."""
        for service in services:
            service.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.add(self._server, (*self._names, health.SERVICE_NAME))

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        if self._tokens is None:
            return [DecodingInterceptor()]
        open_services = [name for o in self._config.open_services for name in _OPEN_SERVICES[o]]
        return [TokenInterceptor(self._tokens, open_services), DecodingInterceptor()]

    async def start(self) -> None:
        """Start listening, with health NOT_SERVING.

        Raises:
            AccessError: a certificate, key or token file cannot be used.
            BindError: the server cannot listen on the address.

        """
        await self.set_serving(False)
        if self._tokens is not None:
            self._tokens.load()
        address = self._config.address
        if self._socket is None:
            port = self._listen(address)
        else:
            self._socket.check()
            with self._socket.creation():
                port = self._listen(self._socket.bind_address)
        _warn_if_exposed(self._config)
        await self._server.start()
        if self._socket is None:
            address = f"{address.rpartition(':')[0]}:{port}"
        else:
            self._socket.publish()
        self.address = address

    def _listen(self, address: str) -> int:
        config = self._config
        credentials = None
        if config.tls_cert is not None and config.tls_key is not None:
            credentials = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca).credentials()
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise BindError(
                f"cannot listen on {address}: the address is in use or does not belong to this machine"
            ) from None

    async def set_serving(self, serving: bool) -> None:  # noqa: FBT001  # its only parameter
        """Set the health of all services to SERVING or NOT_SERVING and notify watchers."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def watch_files(self) -> None:
        """Read the file of tokens again whenever it changes, until cancelled."""
        if self._tokens is not None:
            await self._tokens.watch()

    async def stop(self, grace: float) -> None:
        """Stop listening, end health watches, wait at most `grace` seconds for other calls and cancel the rest."""
        self._health.close()
        await self._server.stop(grace)
        if self._socket is not None:
            self._socket.remove()


def _warn_if_exposed(config: ServerConfig) -> None:
    if config.uds is not None or _is_loopback(config.host):
        return
    if config.tls_cert is None and config.token_file is None:
        logger.warning(
            "listening on %s without TLS and without tokens: anyone on this network can use the engine, abort any request"
            " and read the traffic (--tls-cert, --tls-client-ca, --token-file)",
            config.host,
        )
    elif config.tls_cert is None:
        logger.warning(
            "listening on %s without TLS: tokens and requests can be read in transit (--tls-cert)", config.host
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
