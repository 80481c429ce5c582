"""A text that is being written: pieces for the reader, then the result."""

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

# Seconds that an abort and the end of its request may take before the result does without.
_ABORT_LIMIT = 10.0


class TextStream(AsyncIterator[str]):
    """The text of one request in pieces, and then its result. Leaving it early ends the request on the engine.

        async with text.stream(prompt) as pieces:
            async for piece in pieces:
                ...
        print(pieces.result.finish_reason)

    No piece is empty, has half a character, or shows a part of the stop string that matches. At a match the engine's
    request is aborted while the last piece is read; the loop ends when the engine has let go of it.

    The request starts with the block, or with the first read where there is no block. For one reader at a time.
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
        """The whole answer. Raises RuntimeError before the end."""
        if self._result is None:
            raise RuntimeError("there is no result: the text has not been read to its end")
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """Give the next piece. Raises what starting and reading the request raise."""
        return await anext(await self._open())

    async def aclose(self) -> None:
        """End the request, if it still runs."""
        if self._pieces is None:
            self._pieces = _nothing()
        await self._pieces.aclose()
        if self._started is not None:
            # Where the pieces were never read.
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
                ending = asyncio.create_task(_abort(request, started)) if request.runs_on else None
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
    """Abort, and take what still comes. The text is complete, so that nothing that fails here matters to it."""
    with contextlib.suppress(TokenwireError, TimeoutError):
        async with asyncio.timeout(_ABORT_LIMIT):
            await started.abort()
            async for delta in started.deltas:
                request.take(delta)


async def _nothing() -> AsyncGenerator[str]:
    return
    yield
