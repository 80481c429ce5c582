"""A client's connection: the channel, the metadata of calls, and gRPC errors turned into the client's own."""

# A timeout here is the gRPC deadline, which the server sees too; asyncio.timeout would not do.
# ruff: noqa: ASYNC109

import asyncio
import re
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypedDict, TypeVar, Unpack

import grpc.aio

from tokenwire import _channel
from tokenwire._errors import ClientClosedError, FieldViolation, TokenwireError
from tokenwire._status import error_from_call
from tokenwire._target import grpc_target
from tokenwire._wire import invalid
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

# Seconds, about 30 years. gRPC takes a deadline that overflows its clock as already passed.
_LONGEST_TIMEOUT = 1e9

_METADATA_NAME = re.compile(r"[0-9a-z_.-]+")
_METADATA_TEXT = re.compile(r"[ -~]*")

Metadata: TypeAlias = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]
"""Metadata of a call. Names are lowercased, as gRPC requires; a value in bytes needs a name that ends in "-bin"."""

_Request_contra = TypeVar("_Request_contra", contravariant=True)
_Response_co = TypeVar("_Response_co", covariant=True)
_AnyCall_co = TypeVar("_AnyCall_co", bound="_Call", covariant=True)
_AnyCall = TypeVar("_AnyCall", bound="_Call")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class ChannelSettings(TypedDict, total=False):
    """Options of the gRPC channel."""

    connect_timeout: float
    """Maximum number of seconds to connect to one address; a call then raises UnreachableError. Default: 10."""
    keepalive_time: float
    """Seconds between keepalive pings on a connection without traffic, with or without calls. Default: 30."""
    keepalive_timeout: float
    """Seconds to wait for the answer to a ping before the connection is closed as broken. Default: 20."""
    max_receive_message_bytes: int
    """Maximum size of a received message, in bytes; a larger one raises MessageTooLargeError. Default: 256 MiB."""
    max_send_message_bytes: int
    """Maximum size of a sent message, in bytes; a larger one raises MessageTooLargeError. Default: 64 MiB."""
    enable_http_proxy: bool
    """Whether to connect through the HTTP proxy that the environment names in grpc_proxy, https_proxy or http_proxy,
    unless no_grpc_proxy or no_proxy lists the host. Default: False, unlike gRPC's own default."""


class ClientOptions(ChannelSettings, total=False):
    """The keyword arguments of `AsyncClient` and `Client`."""

    credentials: grpc.ChannelCredentials | None
    """TLS credentials, from `grpc.ssl_channel_credentials(ca, key, cert)`, each the bytes of a PEM file. Key and
    certificate are only needed if the server verifies clients. None: plain text."""
    token: str | None
    """Bearer token, sent with every call in the `authorization` metadata; unencrypted without `credentials`. None: no
    token."""
    metadata: Metadata | None
    """Metadata of every call, sent before the call's own. None: nothing is added."""
    channel_options: Sequence[tuple[str, str | int]]
    """Additional gRPC channel arguments, which override the client's own. Default: none."""


class _Call(Protocol):
    def cancel(self) -> bool: ...


class _UnaryCall(_Call, Awaitable[_Response_co], Protocol[_Response_co]): ...


class _Method(Protocol[_Request_contra, _AnyCall_co]):
    def __call__(
        self,
        request: _Request_contra,
        /,
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str | bytes], ...],
    ) -> _AnyCall_co: ...


class Connection:
    """A channel that is opened by the first call, in that call's event loop, and closed once."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Metadata | None = None,
        channel_options: Sequence[tuple[str, str | int]] = (),
        **settings: Unpack[ChannelSettings],
    ) -> None:
        """Make a connection, which the first call opens.

        Args:
            target: the server's address, as in `AsyncClient`.
            credentials: see `ClientOptions`.
            token: see `ClientOptions`.
            metadata: see `ClientOptions`.
            channel_options: see `ClientOptions`.
            **settings: fields of `ChannelSettings`.

        Raises:
            ValueError: the target is not an address that gRPC can connect to.
            InvalidArgumentError: the metadata cannot be sent.

        """
        self.target = target
        self._grpc_target = grpc_target(target)
        self.closed = False
        self._credentials = credentials
        authorization = () if token is None else (("authorization", f"Bearer {token}"),)
        self._metadata = _pairs(metadata) + _pairs(authorization)
        # gRPC uses the first value of a name (grpcio 1.85).
        self._options = list(dict([*_channel.channel_options(**settings), *channel_options]).items())
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stub: EngineServiceStub | None = None
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, opened if it is not yet. Raises ClientClosedError, also in another event loop than its own."""
        if self.closed:
            raise self._closed_error()
        loop = asyncio.get_running_loop()
        if self._channel is None:
            self._loop = loop
            self._channel = _channel.open_channel(self._grpc_target, self._credentials, self._options)
        elif self._loop is not loop:
            raise self._loop_error()
        return self._channel

    @property
    def max_send_message_bytes(self) -> int:
        """Maximum size of a sent message, in bytes. -1: no limit."""
        return int(dict(self._options)["grpc.max_send_message_length"])

    @property
    def stub(self) -> EngineServiceStub:
        """The stub of EngineService on the channel. Raises ClientClosedError."""
        if self._stub is None or self.closed or self._loop is not asyncio.get_running_loop():
            self._stub = EngineServiceStub(self.channel)
        return self._stub

    def start(
        self,
        method: _Method[_Request, _AnyCall],
        request: _Request,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> _AnyCall:
        """Start a call, which is cancelled when the connection is closed.

        Args:
            method: a method of the stub, or of the channel.
            request: the request. None for a method with a stream of requests.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.

        Returns:
            The call.

        Raises:
            InvalidArgumentError: the metadata cannot be sent.

        """
        if timeout is not None and timeout > _LONGEST_TIMEOUT:
            timeout = None
        merged = self._metadata if metadata is None else self._metadata + _pairs(metadata)
        call = method(request, timeout=timeout, metadata=merged)
        self._calls.add(call)
        return call

    async def unary(
        self,
        method: _Method[_Request, _UnaryCall[_Response]],
        request: _Request,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> _Response:
        """Call a unary method.

        Args:
            method: a method of the stub, or of the channel.
            request: the request.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.

        Returns:
            The response.

        Raises:
            TokenwireError: the call failed; no other exception but asyncio.CancelledError is raised.

        """
        call = self.start(method, request, timeout, metadata)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self.error(error) from None
        except asyncio.CancelledError:
            self.raise_if_closed()
            raise
        finally:
            call.cancel()

    def error(self, error: grpc.aio.AioRpcError) -> TokenwireError:
        """Convert a gRPC error into the client's own."""
        return error_from_call(error, self.target)

    def raise_if_closed(self) -> None:
        """Raise ClientClosedError if a CancelledError was caused by closing the client, not by cancelling the task.

        grpc.aio raises CancelledError for both, and it must not reach a task that was not cancelled.
        """
        if self.closed and not task_is_cancelled():
            raise self._closed_error() from None

    async def close(self) -> None:
        """Cancel the calls in flight and close the channel. Safe to call again.

        Raises ClientClosedError in another event loop than the channel's, which is still open.
        """
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            if not self._loop.is_closed():
                raise self._loop_error()
            # Its calls have ended with it.
            self._calls.clear()
            self._channel = self._stub = None
        self.closed = True
        # Closing a channel of grpc.aio (1.74) misses calls that are wrapped.
        for call in list(self._calls):
            call.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _closed_error(self) -> ClientClosedError:
        return ClientClosedError(f"the client of {self.target} is closed")

    def _loop_error(self) -> ClientClosedError:
        has_ended = self._loop is not None and self._loop.is_closed()
        return ClientClosedError(
            f"the client of {self.target} belongs to another event loop{', which has ended' if has_ended else ''}: "
            "create an AsyncClient in each event loop, inside the coroutine that asyncio.run runs, or use "
            "tokenwire.Client, which works in any thread"
        )


def task_is_cancelled() -> bool:
    """Whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _pairs(metadata: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    """Return metadata as pairs. Raises InvalidArgumentError for what gRPC would refuse with errors of its own."""
    if metadata is None:
        return ()
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
    return tuple(_pair(name.lower(), value) for name, value in pairs)


def _pair(name: str, value: str | bytes) -> tuple[str, str | bytes]:
    if not _METADATA_NAME.fullmatch(name):
        raise invalid(FieldViolation("metadata", f"{name!r} is not a valid name: use ASCII letters, digits and -_."))
    if isinstance(value, bytes):
        if not name.endswith("-bin"):
            raise invalid(FieldViolation("metadata", f"the name of a bytes value must end in -bin, not {name!r}"))
    elif not _METADATA_TEXT.fullmatch(value):
        # Without the value, which may be a secret.
        raise invalid(FieldViolation("metadata", f"the value of {name!r} must be printable ASCII text"))
    return name, value
