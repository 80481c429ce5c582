"""tokenwire GenerateStream, by the typed client."""

import asyncio
import time
from collections.abc import AsyncIterator

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import CancelsStreams
from bench.measure import Seen
from tokenwire import AsyncClient, Delta, SamplingParams


class GenerateStreamContender(CancelsStreams):
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
    async def cancel(self, prompt: list[int], streams: int, concurrency: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1_000, ignore_eos=True)
        left = iter(range(streams))

        async def worker() -> None:
            for _ in left:
                async with self._client.stream(prompt, params) as deltas:
                    await anext(deltas)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    @override
    async def close(self) -> None:
        await self._client.close()

    async def _one(self, prompt: list[int], params: SamplingParams, number: int, seen: Seen) -> None:
        async with self._client.stream(prompt, params) as deltas:
            await read(deltas, number, seen)


async def read(deltas: AsyncIterator[Delta], number: int, seen: Seen) -> None:
    """Read a request's deltas to their end and note them."""
    tokens, times, logprobs = seen.tokens[number], seen.times[number], seen.logprobs[number]
    async for delta in deltas:
        for output in delta.outputs:
            if output.token_ids:
                times.append(time.perf_counter())
                tokens.extend(output.token_ids)
            if output.logprobs is not None:
                logprobs.extend(output.logprobs.logprobs)


def sampling_params(case: Case) -> SamplingParams:
    """Give the parameters of a case's requests."""
    return SamplingParams(temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True, logprobs=case.logprobs)


def make() -> GenerateStreamContender:
    """Make the contender."""
    return GenerateStreamContender()
