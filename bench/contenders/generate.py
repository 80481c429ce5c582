"""tokenwire Generate with the typed client."""

import asyncio
import time

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.contenders.generate_stream import sampling_params
from bench.measure import Received
from tokenwire import AsyncClient, SamplingParams


class GenerateContender(Contender):
    """One call per request."""

    _client: AsyncClient

    @override
    async def open(self, address: str) -> None:
        self._client = AsyncClient(address)

    @override
    async def run(self, case: Case, prompts: list[list[int]], received: Received) -> None:
        params = sampling_params(case)
        await asyncio.gather(*(self._one(prompt, params, number, received) for number, prompt in enumerate(prompts)))

    @override
    async def close(self) -> None:
        await self._client.close()

    async def _one(self, prompt: list[int], params: SamplingParams, number: int, received: Received) -> None:
        result = await self._client.generate(prompt, params)
        received.times[number].append(time.perf_counter())
        received.tokens[number].extend(result.token_ids)


def make() -> GenerateContender:
    """Create the contender."""
    return GenerateContender()
