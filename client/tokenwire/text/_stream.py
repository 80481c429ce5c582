"""The stream of a text: pieces, then the result."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self, TypeAlias

from tokenwire._errors import TokenwireError
from tokenwire.text._carrier import Started
from tokenwire.text._request import TextRequest
from tokenwire.text._result import TextResult

Start: TypeAlias = Callable[[], Awaitable[tuple[TextRequest, Started]]]
"""Encodes the prompt and starts the request."""

# Maximum number of seconds to wait for an abort and the end of its request, whose token counts the result reports.
_ABORT_LIMIT = 10.0


class TextStream(AsyncIterator[str]):
    """Iterates over the text of one request in pieces, then has its result. Leaving it early aborts the request.

        async with text.stream(prompt) as pieces:
            async for piece in pieces:
                ...
        print(pieces.result.finish_reason)

    No piece is empty, has an incomplete character, or has a part of the stop string that matches. At a match, the
    request is aborted in the engine while the last piece is read. The loop ends when the abort has been confirmed.

    The request starts when the block is entered, or with the first read. Only one task may read at a time.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._started: Started | None = None
        self._pieces: AsyncGenerator[str] | None = None
        self._result: TextResult | None = None

    @property
    def request_id(self) -> str:
        """The request's id, for `AsyncClient.abort`. Raises RuntimeError before the start."""
        if self._started is None:
            raise RuntimeError("the request has not been started: enter the block first")
        return self._started.deltas.request_id

    @property
    def result(self) -> TextResult:
        """The complete output. Raises RuntimeError before the end of the text."""
        if self._result is None:
            raise RuntimeError("there is no result yet: the text has not been read to its end")
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """Return the next piece. Raises what encoding the prompt, starting the request and reading it raise."""
        return await anext(await self._open())

    async def aclose(self) -> None:
        """Abort the request unless it has finished."""
        if self._pieces is None:
            self._pieces = _nothing()
        await self._pieces.aclose()
        if self._started is not None:
            # _read has not started, and so does not close them.
            await self._started.deltas.aclose()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _open(self) -> AsyncGenerator[str]:
        if self._pieces is None:
            request, self._started = await self._start()
            self._pieces = self._read(request, self._started)
        return self._pieces

    async def _read(self, request: TextRequest, started: Started) -> AsyncGenerator[str]:
        async with contextlib.aclosing(started.deltas):
            async for delta in started.deltas:
                piece = request.take(delta)
                ending = asyncio.create_task(_abort(request, started)) if request.is_running_on else None
                try:
                    if piece:
                        yield piece
                    if ending is not None:
                        await ending
                        break
                finally:
                    if ending is not None:
                        ending.cancel()
        self._result = request.result(started.deltas.request_id)


async def _abort(request: TextRequest, started: Started) -> None:
    """Abort the request and count the tokens that still arrive. The text is complete, so errors are ignored."""
    with contextlib.suppress(TokenwireError, TimeoutError):
        async with asyncio.timeout(_ABORT_LIMIT):
            await started.abort()
            async for delta in started.deltas:
                request.take(delta)


async def _nothing() -> AsyncGenerator[str]:
    return
    yield
