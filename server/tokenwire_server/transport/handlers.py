"""Method handlers: decoding of requests, and writing of streaming responses.

Malformed requests are refused with INVALID_ARGUMENT for the methods of all services. gRPC itself would respond with
UNKNOWN and the exception's text, and log a traceback for every such request.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tokenwire._contract import Reason
from tokenwire_server import errors
from tokenwire_server.errors import RequestError

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = grpc.RpcMethodHandler  # takes its type parameters in annotations only


_MALFORMED = object()
"""Stands for a request that could not be decoded."""


class ResponseWriter:
    """Writes the responses of a streaming call."""

    __slots__ = ("_write", "blocked_since")

    def __init__(self, context: _Context) -> None:
        self._write = context.write
        self.blocked_since: float | None = None
        """The `time.monotonic` time at which the write in progress started; None if there is none."""

    async def write(self, response: Any) -> None:
        """Write a response; waits while the caller does not read.

        Raises:
            asyncio.CancelledError: the call has ended, for example because the caller disconnected.

        """
        self.blocked_since = time.monotonic()
        try:
            await self._write(response)
        except grpc.aio.InternalError:
            # gRPC raises this for a caller that has disconnected, before it cancels the method, and would log an error.
            raise asyncio.CancelledError from None
        self.blocked_since = None


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each method in a handler that refuses malformed requests. Must be the innermost interceptor."""

    def __init__(self) -> None:
        self._handlers: dict[str, _Handler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler[Any, Any] | None":
        """Return the method's handler; None for an unknown method."""
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None and (own := await continuation(handler_call_details)) is not None:
            handler = self._handlers[method] = _checked(own)
        return handler


def _checked(handler: "_Handler[Any, Any]") -> "_Handler[Any, Any]":
    decode, encode = _tolerant(handler.request_deserializer), handler.response_serializer
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(_coroutine(handler.unary_unary), decode, encode)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(_bidirectional(handler.stream_stream), decode, encode)
    assert handler.unary_stream is not None, "no service has a client-streaming method"
    return grpc.unary_stream_rpc_method_handler(_coroutine(_writing(handler.unary_stream)), decode, encode)


def _tolerant(decode: Any) -> Callable[[bytes], Any]:
    def decode_or_not(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _MALFORMED

    return decode_or_not


def _coroutine(method: Any) -> Any:
    async def checked(request: Any, context: _Context) -> Any:
        if request is _MALFORMED:
            await _refuse(context)
        return await method(request, context)

    return checked


def _bidirectional(method: Any) -> Any:
    run = _writing(method)

    async def read(requests: AsyncIterator[Any], context: _Context) -> AsyncGenerator[Any, None]:
        async for request in requests:
            if request is _MALFORMED:
                await _refuse(context)
            yield request

    async def checked(requests: AsyncIterator[Any], context: _Context) -> None:
        await run(read(requests, context), context)

    return checked


def _writing(method: Any) -> Any:
    """Return a streaming method as a coroutine that writes its responses; third-party services use generators."""
    if not inspect.isasyncgenfunction(method):
        return method

    async def write_all(request: Any, context: _Context) -> None:
        writer = ResponseWriter(context)
        async with contextlib.aclosing(method(request, context)) as responses:
            async for response in responses:
                await writer.write(response)

    return write_all


async def _refuse(context: _Context) -> NoReturn:
    error = RequestError(Reason.INVALID_FIELD, "the request is not a well-formed message of the method's type")
    async with errors.boundary(context, "decoding"):
        raise error
    raise error  # unreachable, which the boundary's type does not express
