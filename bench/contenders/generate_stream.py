"""tokenwire GenerateStream with the typed client."""

import asyncio
import time
from collections.abc import AsyncIterator

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import CancellingContender
from bench.measure import Received
from tokenwire import AsyncClient, Delta, SamplingParams


class GenerateStreamContender(CancellingContender):
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
    async def cancel(self, prompt: list[int], streams: int, concurrency: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1_000, ignore_eos=True)
        remaining = iter(range(streams))

        async def worker() -> None:
            for _ in remaining:
                async with self._client.stream(prompt, params) as deltas:
                    await anext(deltas)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    @override
    async def close(self) -> None:
        await self._client.close()

    async def _one(self, prompt: list[int], params: SamplingParams, number: int, received: Received) -> None:
        async with self._client.stream(prompt, params) as deltas:
            await read(deltas, number, received)


async def read(deltas: AsyncIterator[Delta], number: int, received: Received) -> None:
    """Read and record the deltas of a request until it has finished.

    Args:
        deltas: the deltas.
        number: index of the request in its case.
        received: records the outputs.

    """
    tokens, times, logprobs = received.tokens[number], received.times[number], received.logprobs[number]
    async for delta in deltas:
        for output in delta.outputs:
            if output.token_ids:
                times.append(time.perf_counter())
                tokens.extend(output.token_ids)
            if output.logprobs is not None:
                logprobs.extend(output.logprobs.logprobs)


def sampling_params(case: Case) -> SamplingParams:
    """Return the sampling parameters of a case."""
    return SamplingParams(temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True, logprobs=case.logprobs)


def make() -> GenerateStreamContender:
    """Create the contender."""
    return GenerateStreamContender()
