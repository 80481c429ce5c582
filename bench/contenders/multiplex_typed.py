"""tokenwire Multiplex with a typed stream and a task for each request."""

import asyncio

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.contenders.generate_stream import read, sampling_params
from bench.measure import Seen
from tokenwire import AsyncClient, Multiplex, MultiplexedStream


class TypedMultiplexContender(Contender):
    """One stream for all requests of all cases."""

    _client: AsyncClient
    _multiplex: Multiplex

    @override
    async def open(self, address: str) -> None:
        self._client = AsyncClient(address)
        self._multiplex = await self._client.multiplex().__aenter__()

    @override
    async def run(self, case: Case, prompts: list[list[int]], seen: Seen) -> None:
        params = sampling_params(case)
        streams = [self._multiplex.submit(prompt, params) for prompt in prompts]
        await asyncio.gather(*(self._one(stream, number, seen) for number, stream in enumerate(streams)))

    @override
    async def close(self) -> None:
        await self._multiplex.__aexit__(None, None, None)
        await self._client.close()

    async def _one(self, stream: MultiplexedStream, number: int, seen: Seen) -> None:
        async with stream as deltas:
            await read(deltas, number, seen)


def make() -> TypedMultiplexContender:
    """Make the contender."""
    return TypedMultiplexContender()
