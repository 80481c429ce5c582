"""tokenwire Generate, by the typed client."""

import asyncio
import time

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.contenders.generate_stream import sampling_params
from bench.measure import Seen
from tokenwire import AsyncClient, SamplingParams


class GenerateContender(Contender):
    """A call for each request."""

    _client: AsyncClient

    @override
    async def open(self, address: str) -> None:
        self._client = AsyncClient(address)

    @override
    async def run(self, case: Case, prompts: list[list[int]], seen: Seen) -> None:
        params = sampling_params(case)
        await asyncio.gather(*(self._one(prompt, params, number, seen) for number, prompt in enumerate(prompts)))

    @override
    async def close(self) -> None:
        await self._client.close()

    async def _one(self, prompt: list[int], params: SamplingParams, number: int, seen: Seen) -> None:
        result = await self._client.generate(prompt, params)
        seen.times[number].append(time.perf_counter())
        seen.tokens[number].extend(result.token_ids)


def make() -> GenerateContender:
    """Make the contender."""
    return GenerateContender()
