"""Refuses requests that are not well-formed messages, for the methods of all services.

gRPC's own answer is UNKNOWN with the exception's text, and a traceback in the log for every such request.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tokenwire._contract import Reason
from tokenwire_server import errors
from tokenwire_server.errors import RequestError

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = grpc.RpcMethodHandler  # which takes its parameters in annotations only


_MALFORMED = object()
"""In place of a request that is not a well-formed message."""


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Gives each method a handler that refuses what does not decode. To be the innermost of the interceptors."""

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
        return grpc.stream_stream_rpc_method_handler(_requests(handler.stream_stream), decode, encode)
    assert handler.unary_stream is not None, "no service has a method with a stream of requests and one response"
    # gRPC tells generators from coroutines, which write their messages themselves.
    wrap = _writer if inspect.isasyncgenfunction(handler.unary_stream) else _coroutine
    return grpc.unary_stream_rpc_method_handler(wrap(handler.unary_stream), decode, encode)


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


def _writer(method: Any) -> Any:
    async def checked(request: Any, context: _Context) -> None:
        if request is _MALFORMED:
            await _refuse(context)
        await _write_all(context, method(request, context))

    return checked


def _requests(method: Any) -> Any:
    async def read(requests: AsyncIterator[Any], context: _Context) -> AsyncGenerator[Any, None]:
        async for request in requests:
            if request is _MALFORMED:
                await _refuse(context)
            yield request

    async def checked(requests: AsyncIterator[Any], context: _Context) -> None:
        await _write_all(context, method(read(requests, context), context))

    return checked


async def _write_all(context: _Context, messages: AsyncGenerator[Any, None]) -> None:
    """Write a method's messages, in place of gRPC's own loop: a generator around it would cost each message."""
    async with contextlib.aclosing(messages) as responses:
        async for response in responses:
            try:
                await context.write(response)
            except grpc.aio.InternalError:
                # gRPC's word for a caller who has gone, where it has not cancelled the method yet; it would log a failure.
                raise asyncio.CancelledError from None


async def _refuse(context: _Context) -> NoReturn:
    error = RequestError(Reason.INVALID_FIELD, "the request is not a well-formed message of the method's type")
    async with errors.boundary(context, "decoding"):
        raise error
    raise error  # which the boundary's type does not show to be unreachable
