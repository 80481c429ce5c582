"""The streams of the blocking client."""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from tokenwire._call_stream import CallStream
from tokenwire._errors import ClientClosedError
from tokenwire._health import HealthStatus
from tokenwire._loop_thread import LoopThread
from tokenwire._results import Delta
from tokenwire._stream import AsyncDeltaStream

_T = TypeVar("_T")


class _BlockingStream(Iterator[_T], Generic[_T]):
    """Reads a stream whose event loop runs in another thread."""

    def __init__(self, thread: LoopThread, stream: CallStream[_T]) -> None:
        self._thread = thread
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        """Return the next one. Raises the same errors as the asyncio client's stream."""
        for item in self._thread.run(_next(self._stream)):
            return item
        raise StopIteration

    def close(self) -> None:
        """Cancel the call unless it has ended. Safe to call again."""
        # A closed client has already cancelled the call.
        with contextlib.suppress(ClientClosedError):
            self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class DeltaStream(_BlockingStream[Delta]):
    """Iterates over the deltas of one request. Leaving it early aborts the request on the server.

    The request is aborted when the stream's `with` block is left, by `close()`, and by Ctrl-C during a read. A bare
    `for` that is left early aborts it only when the stream object is garbage-collected; see `AsyncDeltaStream`.
    """

    def __init__(self, thread: LoopThread, stream: AsyncDeltaStream) -> None:
        super().__init__(thread, stream)
        self.request_id = stream.request_id
        """The request's id, for `abort`."""


class HealthWatch(_BlockingStream[HealthStatus]):
    """Iterates over a service's health status: the present one, then each change; see `AsyncHealthWatch`."""


async def _next(stream: CallStream[_T]) -> list[_T]:
    """Return the next item; an empty list at the end, since a coroutine cannot raise StopAsyncIteration."""
    async for item in stream:
        return [item]
    return []
