"""A call whose responses are iterated, and which is cancelled when it is no longer read."""

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc.aio

from tokenwire._connection import Connection, task_is_cancelled
from tokenwire._status import malformed

_T = TypeVar("_T")


class CallStream(AsyncIterator[_T], Generic[_T]):
    """Iterates over the responses of a call. Subclasses convert them."""

    # The class's own value is for __del__ after an __init__ that has failed: there is no call to cancel.
    _closed = True

    def __init__(self, connection: Connection, call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
        """Read a call that has been started.

        Args:
            connection: the connection to the server.
            call: the call.

        """
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._call = call
        # Not call.read(), which checks the status first and would drop messages that were received before it.
        self._messages = aiter(call)
        self._closed = False

    @abstractmethod
    def _convert(self, message: Any) -> _T:
        """Convert a response. Raises ValueError if it breaks the contract."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        """Return the next one. Raises StatusError, UnreachableError and ClientClosedError."""
        if self._closed:
            raise StopAsyncIteration
        try:
            return self._convert(await anext(self._messages))
        except StopAsyncIteration:
            self._closed = True
            raise
        except grpc.aio.AioRpcError as error:
            self._closed = True
            raise self._connection.error(error) from None
        except ValueError as error:
            self._close()
            raise malformed(error) from None
        except asyncio.CancelledError:
            self._close()
            if task_is_cancelled():
                raise
            self._connection.raise_if_closed()
            raise StopAsyncIteration from None  # aclose() was called in another task

    async def aclose(self) -> None:
        """Cancel the call unless it has ended. Ends the iteration of a task that is reading."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        # grpc.aio never frees an abandoned call (grpc/grpc#43462), so this wrapper cancels it. The garbage collector
        # may run in any thread. RuntimeError: the loop is closed, and its calls have ended.
        if not self._closed:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._call.cancel)

    def _close(self) -> None:
        self._closed = True
        self._call.cancel()
