"""The stream of one request of a Multiplex."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from tokenwire._errors import ClientClosedError
from tokenwire._multiplex.request import MultiplexedRequest
from tokenwire._results import Delta, GenerateResult


class MultiplexedStream(AsyncIterator[Delta]):
    """The deltas of one request of a `Multiplex`, or its result. Leaving it early aborts the request on the server.

    As with `AsyncDeltaStream`, the request is aborted when its `async with` block is left, by `aclose()` and by
    cancelling the task that reads, and otherwise when the stream object is garbage-collected. The other requests are
    not affected. Only one task may read at a time.

    A delta has everything that has arrived since the previous one. If prompt log probabilities were requested, the
    first delta waits for all of them. A sequence's sampling mask arrives as a whole with its finish, and so does the
    cumulative log probability.
    """

    def __init__(
        self,
        request: MultiplexedRequest,
        abort: Callable[[MultiplexedRequest], None],
        leave: Callable[[MultiplexedRequest], None],
    ) -> None:
        """Make the stream of a request that has been submitted.

        Args:
            request: the request.
            abort: aborts the request on the server.
            leave: also drops its unread output.

        """
        self.request_id = request.request_id
        """The request's id, for `AsyncClient.abort`."""
        self.handle = request.handle
        """The request's handle. It is reused by another request after the end."""
        self._request = request
        self._result: GenerateResult | None = None
        self._abort = abort
        self._leave = leave
        self._loop = asyncio.get_running_loop()

    def abort(self) -> None:
        """Abort the request without waiting. The stream ends with ABORT after the tokens generated so far."""
        self._abort(self._request)

    async def result(self) -> GenerateResult:
        """Wait for the end of the request. Takes less CPU time than reading deltas.

        Returns:
            The complete output.

        Raises:
            StatusError: the request was rejected or has failed.
            UnreachableError: the connection was lost.
            ClientClosedError: the client was closed.
            RuntimeError: deltas have been read.

        """
        request = self._request
        if self._result is None:
            if not request.is_whole:
                raise RuntimeError("the result is incomplete: deltas were read, or the stream was left")
            if not request.has_ended:
                try:
                    await request.ended()
                except asyncio.CancelledError:
                    self._leave(request)
                    raise
                if not request.is_whole:
                    raise ClientClosedError("the stream was closed while a task waited for its result")
            error = request.error()
            if error is not None:
                raise error
            self._result = request.take_result()
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta. Raises StatusError, UnreachableError and ClientClosedError."""
        request = self._request
        while (delta := request.take_delta()) is None:
            if request.has_ended:
                error = request.take_error()
                raise StopAsyncIteration if error is None else error
            try:
                await request.readable()
            except asyncio.CancelledError:
                self._leave(request)
                raise
        return delta

    async def aclose(self) -> None:
        """Abort the request unless it has ended, and drop unread output. A task that is reading stops iterating."""
        self._leave(self._request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(self._request)

    def __del__(self) -> None:
        # The garbage collector may run in any thread. RuntimeError: the loop is closed, and its calls have ended.
        request = self._request
        if not request.has_ended or request.num_unread:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._leave, request)
