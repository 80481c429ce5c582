"""Authenticates every call by its bearer token, before any message of the request is read."""

from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeAlias, TypeVar

import grpc

from tokenwire._contract import Reason
from tokenwire_server import errors
from tokenwire_server.access import caller
from tokenwire_server.access.tokens import Grant, TokenFile
from tokenwire_server.errors import RequestError

_SCHEME = "bearer"

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = grpc.RpcMethodHandler  # subscriptable in annotations only
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Rejects calls without a valid token, except calls to the open services.

    It runs once per call, in the task of the call, and does not wrap the method's handler, so it adds no cost per
    message.
    """

    def __init__(self, tokens: TokenFile, open_services: Collection[str]) -> None:
        """Create an interceptor.

        Args:
            tokens: the valid tokens.
            open_services: full names of the services that can be called without a token.

        """
        self._tokens = tokens
        self._open = frozenset(open_services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler[_Request, _Response] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler[_Request, _Response] | None":
        """Return the method's handler, or a handler that rejects the call."""
        service, _, method = handler_call_details.method.removeprefix("/").rpartition("/")
        if service not in self._open:
            try:
                caller.set_grant(self._grant(handler_call_details.invocation_metadata))
            except RequestError as error:
                return _rejection(error, method)
        return await continuation(handler_call_details)

    def _grant(self, metadata: Collection[tuple[str, str | bytes]]) -> Grant:
        values = [value for key, value in metadata if key == "authorization"]
        if not values:
            raise _unauthenticated("this server needs a token: send the metadata authorization: Bearer TOKEN")
        scheme, _, token = str(values[0]).partition(" ")
        if len(values) > 1 or scheme.lower() != _SCHEME:
            raise _unauthenticated("the metadata must contain one authorization entry of the form Bearer TOKEN")
        grant = self._tokens.grant(token.strip())
        if grant is None:
            raise _unauthenticated("invalid token")
        return grant


def _unauthenticated(message: str) -> RequestError:
    return RequestError(Reason.UNAUTHENTICATED, message)


def _rejection(error: RequestError, method: str) -> "_Handler[Any, Any]":
    async def reject(_requests: object, context: _Context) -> None:
        async with errors.boundary(context, method):
            raise error

    # Used for unary methods too: only a request-streaming handler runs before a request message is read.
    return grpc.stream_stream_rpc_method_handler(reject)
