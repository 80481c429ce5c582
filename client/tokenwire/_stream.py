"""The stream of one request's deltas, which aborts the request when it is no longer read."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc.aio

from tokenwire._connection import Connection, Metadata, task_is_cancelled
from tokenwire._results import Delta
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput


class AsyncDeltaStream(AsyncIterator[Delta]):
    """Iterates over the deltas of one request. Leaving it early aborts the request on the server.

    Leaving the stream's `async with` block in any way cancels the call, and the server aborts the request. So do
    `aclose()`, an error, and cancelling the task that reads. A bare `async for` that is left by `break` or an exception
    cancels the call only when the stream object is garbage-collected: in CPython at once, unless a variable or a stored
    traceback still refers to it.

    The request starts with the call of `stream`, not with the first read. Only one task may read at a time.
    """

    def __init__(
        self,
        connection: Connection,
        generation_input: GenerationInput,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> None:
        """Start a request.

        Args:
            connection: the connection to the server.
            generation_input: the request.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of the call, sent after the client's own. None: nothing is added.

        Raises:
            ClientClosedError: the client is closed.
            InvalidArgumentError: the metadata cannot be sent.

        """
        self._closed = True  # __del__ has no call to cancel yet
        self.request_id = generation_input.request_id
        """The request's id, for `abort`."""
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        request = pb.GenerateStreamRequest(input=generation_input)
        self._call = connection.start(connection.stub.GenerateStream, request, timeout, metadata)
        # Not call.read(), which checks the status first and would drop messages that were received before it.
        self._messages = aiter(self._call)
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta. Raises StatusError, UnreachableError and ClientClosedError."""
        if self._closed:
            raise StopAsyncIteration
        try:
            message = await anext(self._messages)
        except StopAsyncIteration:
            self._closed = True
            raise
        except grpc.aio.AioRpcError as error:
            self._closed = True
            raise self._connection.error(error) from None
        except asyncio.CancelledError:
            self._close()
            if task_is_cancelled():
                raise
            self._connection.raise_if_closed()
            raise StopAsyncIteration from None  # aclose() was called in another task
        return Delta.from_proto(message, self.request_id)

    async def aclose(self) -> None:
        """Abort the request unless it has finished. Ends the iteration of a task that is reading."""
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
