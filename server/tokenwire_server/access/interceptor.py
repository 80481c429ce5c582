"""Asks every call for a bearer token, before anything of its request is read."""

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
_Handler: TypeAlias = grpc.RpcMethodHandler  # which takes its parameters in annotations only
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls with a token through, and those of open services.

    It runs in the task of the call, once, and leaves the method's own handler as it is: a message costs nothing.
    """

    def __init__(self, tokens: TokenFile, open_services: Collection[str]) -> None:
        """Make an interceptor.

        Args:
            tokens: the tokens.
            open_services: full names of the services that need no token.

        """
        self._tokens = tokens
        self._open = frozenset(open_services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler[_Request, _Response] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler[_Request, _Response] | None":
        """Return the method's handler, or one that refuses the call."""
        service, _, method = handler_call_details.method.removeprefix("/").rpartition("/")
        if service not in self._open:
            try:
                caller.set_grant(self._grant(handler_call_details.invocation_metadata))
            except RequestError as error:
                return _refusal(error, method)
        return await continuation(handler_call_details)

    def _grant(self, metadata: Collection[tuple[str, str | bytes]]) -> Grant:
        values = [value for key, value in metadata if key == "authorization"]
        if not values:
            raise _unauthenticated("this server needs a token: send the metadata authorization: Bearer TOKEN")
        scheme, _, token = str(values[0]).partition(" ")
        if len(values) > 1 or scheme.lower() != _SCHEME:
            raise _unauthenticated("the metadata must hold one authorization, of the form Bearer TOKEN")
        grant = self._tokens.grant(token.strip())
        if grant is None:
            raise _unauthenticated("the token is not one of this server's")
        return grant


def _unauthenticated(message: str) -> RequestError:
    return RequestError(Reason.UNAUTHENTICATED, message)


def _refusal(error: RequestError, method: str) -> "_Handler[Any, Any]":
    async def refuse(_requests: object, context: _Context) -> None:
        async with errors.boundary(context, method):
            raise error

    # For methods of every kind: only a stream's handler runs before a request is read.
    return grpc.stream_stream_rpc_method_handler(refuse)
