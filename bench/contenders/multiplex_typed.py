"""tokenwire Multiplex with a typed stream and a task per request."""

import asyncio

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.contenders.generate_stream import read, sampling_params
from bench.measure import Received
from tokenwire import AsyncClient, Multiplex, MultiplexedStream


class TypedMultiplexContender(Contender):
    """One Multiplex stream for all requests of all cases."""

    _client: AsyncClient
    _multiplex: Multiplex

    @override
    async def open(self, address: str) -> None:
        self._client = AsyncClient(address)
        self._multiplex = await self._client.multiplex().__aenter__()

    @override
    async def run(self, case: Case, prompts: list[list[int]], received: Received) -> None:
        params = sampling_params(case)
        streams = [self._multiplex.submit(prompt, params) for prompt in prompts]
        await asyncio.gather(*(self._one(stream, number, received) for number, stream in enumerate(streams)))

    @override
    async def close(self) -> None:
        await self._multiplex.__aexit__(None, None, None)
        await self._client.close()

    async def _one(self, stream: MultiplexedStream, number: int, received: Received) -> None:
        async with stream as deltas:
            await read(deltas, number, received)


def make() -> TypedMultiplexContender:
    """Create the contender."""
    return TypedMultiplexContender()
