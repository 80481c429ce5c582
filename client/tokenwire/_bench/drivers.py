"""The drivers that send requests, one class per mode."""

import asyncio
import itertools
from types import TracebackType
from typing import Protocol, Self

from tokenwire._bench.recording import RequestRecord
from tokenwire._bench.workload import Mode, Request
from tokenwire._client import AsyncClient
from tokenwire._errors import TokenwireError
from tokenwire._multiplex.step import MultiplexStep
from tokenwire._sampling_params import SamplingParams


class Sampling(Protocol):
    """Makes the sampling parameters of a request."""

    def __call__(self, max_tokens: int, /) -> SamplingParams: ...


class Driver(Protocol):
    """Sends requests over one connection."""

    async def run(self, request: Request, record: RequestRecord) -> None:
        """Run one request to its end and record its tokens. Raises TokenwireError."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def driver(mode: Mode, client: AsyncClient, sampling: Sampling) -> Driver:
    """Make the driver of a mode.

    Args:
        mode: the RPC that carries the requests.
        client: the client, which the driver closes.
        sampling: makes the sampling parameters of each request.

    Returns:
        The driver, which `async with` opens.

    """
    kinds: dict[Mode, type[_Unary | _Stream | _Multiplex]] = {
        Mode.UNARY: _Unary,
        Mode.STREAM: _Stream,
        Mode.MULTIPLEX: _Multiplex,
    }
    return kinds[mode](client, sampling)


class _Calls:
    """One call per request."""

    def __init__(self, client: AsyncClient, sampling: Sampling) -> None:
        self._client = client
        self._sampling = sampling

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()


class _Unary(_Calls):
    async def run(self, request: Request, record: RequestRecord) -> None:
        result = await self._client.generate(request.prompt_token_ids, self._sampling(request.max_tokens))
        record.tokens(len(result.token_ids))


class _Stream(_Calls):
    async def run(self, request: Request, record: RequestRecord) -> None:
        async with self._client.stream(request.prompt_token_ids, self._sampling(request.max_tokens)) as deltas:
            async for delta in deltas:
                record.tokens(len(delta.token_ids))


class _Live:
    """A request in flight on the stream."""

    __slots__ = ("ended", "record")

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: TokenwireError | None = None) -> None:
        if self.ended.done():  # the future was cancelled
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class _Multiplex:
    """All requests on one Multiplex stream, read step by step."""

    def __init__(self, client: AsyncClient, sampling: Sampling) -> None:
        self._client = client
        self._steps = self._client.multiplex_steps()
        self._sampling = sampling
        self._live: dict[int, _Live] = {}

    async def run(self, request: Request, record: RequestRecord) -> None:
        handle = self._steps.submit(request.prompt_token_ids, self._sampling(request.max_tokens))
        live = self._live[handle] = _Live(record)
        await live.ended

    async def __aenter__(self) -> Self:
        await self._steps.__aenter__()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._steps.__aexit__(exc_type, exc, traceback)
        await self._client.close()

    async def _read(self) -> None:
        try:
            async for step in self._steps:
                self._take(step)
        except TokenwireError as error:
            for live in self._live.values():
                live.end(error)

    def _take(self, step: MultiplexStep) -> None:
        for handle, count in zip(step.handles, step.token_counts or itertools.repeat(1), strict=False):
            self._live[handle].record.tokens(count)
        for finish in step.finished:
            if finish.last:
                self._live.pop(finish.handle).end()
        for refused in (*step.rejected, *step.failed):
            self._live.pop(refused.handle).end(refused.status)
