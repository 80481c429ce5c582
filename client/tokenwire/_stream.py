"""A request's deltas as they come, and the end of the request when nobody reads them any more."""

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
    """The deltas of one request. Leaving it early ends the request on the server.

    `async with` is the form that is guaranteed: the request is cancelled when the block is left, in whatever way. So
    it is by `aclose()`, by cancelling the task that reads, and by an error. A bare `async for` that is left by `break`
    or an exception cancels when the stream object is dropped: in CPython that is at once, unless a variable or a stored
    traceback still holds the stream.

    The request starts with the call of `stream`, not with the first read. For one reader at a time.
    """

    def __init__(
        self,
        connection: Connection,
        generation_input: GenerationInput,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> None:
        self._closed = True  # until there is a call to cancel, for __del__
        self.request_id = generation_input.request_id
        """The request's id, for `abort`."""
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        request = pb.GenerateStreamRequest(input=generation_input)
        self._call = connection.start(connection.stub.GenerateStream, request, timeout, metadata)
        # Not call.read(): it looks at the status first, and would drop messages that are still to be read.
        self._messages = aiter(self._call)
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Give the next delta. Raises StatusError, UnreachableError and ClientClosedError."""
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
            raise StopAsyncIteration from None  # aclose() in another task
        return Delta.from_proto(message, self.request_id)

    async def aclose(self) -> None:
        """Cancel the request, if it still runs. A read that waits in another task ends the iteration there."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        # grpc.aio never collects an abandoned call (grpc/grpc#43462), so the wrapper has to end it. Garbage may be
        # collected in any thread; a loop that is closed has ended its calls.
        if not self._closed:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._call.cancel)

    def _close(self) -> None:
        self._closed = True
        self._call.cancel()
