"""One request of a Multiplex stream, as its reader sees it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from tokenwire._errors import ClientClosedError
from tokenwire._multiplex_request import MultiplexedRequest
from tokenwire._results import Delta, GenerateResult


class MultiplexedStream(AsyncIterator[Delta]):
    """The deltas of one request of a `Multiplex`, or its result. Leaving it early ends the request on the server.

    `async with` is the form that is guaranteed; `aclose()`, cancelling the task that reads and dropping the object end
    the request too, as with `AsyncDeltaStream`. The other requests go on. For one reader at a time.

    A delta holds all that has come since the one before. Where prompt log probabilities were asked for, the first delta
    waits for all of them. A sequence's sampling mask comes whole, with its finish, and the sum of its log probabilities
    with the finish only.
    """

    def __init__(
        self,
        request: MultiplexedRequest,
        abort: Callable[[MultiplexedRequest], None],
        leave: Callable[[MultiplexedRequest], None],
    ) -> None:
        self.request_id = request.request_id
        """The request's id, for `AsyncClient.abort`."""
        self.handle = request.handle
        """The request's number on the wire, another request's after the end."""
        self._request = request
        self._result: GenerateResult | None = None
        self._abort = abort
        self._leave = leave
        self._loop = asyncio.get_running_loop()

    def abort(self) -> None:
        """Abort the request, without waiting: the stream ends with ABORT, after the tokens so far."""
        self._abort(self._request)

    async def result(self) -> GenerateResult:
        """Wait for the end and give the whole answer. Costs the caller less than reading deltas.

        Raises what `__anext__` raises, and RuntimeError where deltas were read before.
        """
        request = self._request
        if self._result is None:
            if not request.is_whole:
                raise RuntimeError("deltas were read, or the stream was left: the result is no longer whole")
            if not request.has_ended:
                try:
                    await request.end()
                except asyncio.CancelledError:
                    self._leave(request)
                    raise
                if not request.is_whole:
                    raise ClientClosedError("the stream was closed while its result was awaited")
            error = request.error()
            if error is not None:
                raise error
            self._result = request.take_result()
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Give the next delta. Raises StatusError, UnreachableError and ClientClosedError."""
        request = self._request
        while (delta := request.take_delta()) is None:
            if request.has_ended:
                error = request.take_error()
                raise StopAsyncIteration if error is None else error
            try:
                await request.news()
            except asyncio.CancelledError:
                self._leave(request)
                raise
        return delta

    async def aclose(self) -> None:
        """End the request, if it still runs, and forget what was not read. A read in another task ends there."""
        self._leave(self._request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(self._request)

    def __del__(self) -> None:
        # Garbage may be collected in any thread; a loop that is closed has ended its calls.
        request = self._request
        if not request.has_ended or request.num_unread:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._leave, request)
