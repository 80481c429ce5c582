"""The gRPC server: options, listening, health and reflection."""

import contextlib
import ipaddress
import logging
import os
import pathlib
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
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

logger = logging.getLogger(__name__)

_OPEN_SERVICES = {
    "health": (health.SERVICE_NAME,),
    "reflection": (reflection.V1, reflection.V1ALPHA),
}
"""Full names of the services behind each name of the option --open-services."""

_MIN_PING_INTERVAL_MS = 5_000
_PROBE_TIMEOUT = 1.0
"""Seconds for a server that may listen on our UNIX socket to take a connection: one that is stopped takes none."""


class Service(NamedTuple):
    """A service to serve."""

    name: str
    """Full name, as health and reflection report it."""
    add_to: Callable[[grpc.aio.Server], None]
    """Adds it to a server that has not started."""


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
    """The listening server: the services that it is given, health and reflection."""

    def __init__(self, config: ServerConfig, services: Iterable[Service]) -> None:
        """Make a server; `start` makes it listen.

        Args:
            config: where and how to listen.
            services: the services to serve.

        """
        self._config = config
        services = list(services)
        self._names = [service.name for service in services]
        self._tokens = None if config.token_file is None else TokenFile(config.token_file)
        self._server = grpc.aio.server(options=_options(config), interceptors=self._interceptors())
        self._health = HealthServicer()
        self.address = ""
        """Where the server listens, in gRPC's notation; known after `start`."""
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
        """Listen, with health NOT_SERVING.

        Raises:
            AccessError: a file of certificates or tokens cannot be used.
            BindError: the address cannot be listened on.

        """
        await self.set_serving(False)
        if self._tokens is not None:
            self._tokens.load()
        address = self._config.address
        with _socket_mode(self._config):
            port = self._listen(address)
        _warn_if_exposed(self._config)
        await self._server.start()
        self.address = address if self._config.uds is not None else f"{address.rpartition(':')[0]}:{port}"

    def _listen(self, address: str) -> int:
        config = self._config
        credentials = None
        if config.tls_cert is not None and config.tls_key is not None:
            credentials = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca).credentials()
        if config.uds is not None:
            _remove_stale_socket(pathlib.Path(config.uds))
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise BindError(f"cannot listen on {address}: the address is in use or not one of this machine's") from None

    async def set_serving(self, serving: bool) -> None:  # noqa: FBT001  # the one thing it says
        """Tell health's callers and watchers."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def watch_files(self) -> None:
        """Read the file of tokens again whenever it changes, until cancelled."""
        if self._tokens is not None:
            await self._tokens.watch()

    async def stop(self, grace: float) -> None:
        """Stop listening, and cancel calls that still run after `grace` seconds."""
        await self._server.stop(grace)
        if self._config.uds is not None:
            _remove(self._config.uds)


@contextlib.contextmanager
def _socket_mode(config: ServerConfig) -> Iterator[None]:
    """Give the UNIX socket that is made in the block its file mode, from its first moment on."""
    if config.uds is None:
        yield
        return
    before = os.umask(0o777 & ~config.uds_mode)
    try:
        yield
    finally:
        os.umask(before)


def _warn_if_exposed(config: ServerConfig) -> None:
    if config.uds is not None or _is_loopback(config.host):
        return
    if config.tls_cert is None and config.token_file is None:
        logger.warning(
            "listening on %s without TLS and without tokens: all who reach it can use the engine, and end and read each"
            " other's requests (--tls-cert, --tls-client-ca, --token-file)",
            config.host,
        )
    elif config.tls_cert is None:
        logger.warning(
            "listening on %s without TLS: tokens and requests can be read on their way (--tls-cert)", config.host
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _remove(path: str) -> None:
    pathlib.Path(path).unlink(missing_ok=True)


def _remove_stale_socket(path: pathlib.Path) -> None:
    """Remove the socket of a server that is gone; leave one that answers, and any other file."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise BindError(f"cannot listen on unix:{path}: a file that is no socket is there")
    except FileNotFoundError:
        return
    except OSError as error:
        raise BindError(f"cannot listen on unix:{path}: {error.strerror}") from None
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (BlockingIOError, TimeoutError):
            pass  # nobody takes the connection, but somebody listens
        except OSError as error:
            raise BindError(f"cannot listen on unix:{path}: {error.strerror or error}") from None
    raise BindError(f"cannot listen on unix:{path}: another server listens there")
