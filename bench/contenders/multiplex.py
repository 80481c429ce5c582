"""tokenwire Multiplex as a coordinator reads it that wants no task for each request: step by step."""

import time

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.contenders.generate_stream import sampling_params
from bench.measure import Seen
from tokenwire import AsyncClient, MultiplexStep, MultiplexSteps


class MultiplexContender(Contender):
    """One stream for all requests of all cases."""

    _client: AsyncClient
    _steps: MultiplexSteps

    @override
    async def open(self, address: str) -> None:
        self._client = AsyncClient(address)
        self._steps = await self._client.multiplex_steps().__aenter__()

    @override
    async def run(self, case: Case, prompts: list[list[int]], seen: Seen) -> None:
        params = sampling_params(case)
        numbers = {self._steps.submit(prompt, params): number for number, prompt in enumerate(prompts)}
        live = len(prompts)
        async for step in self._steps:
            if step.rejected or step.failed:
                raise RuntimeError(f"refused: {step}")
            _note(step, numbers, seen)
            live -= sum(finish.last for finish in step.finished)
            if not live:
                return
        raise RuntimeError("the stream ended")

    @override
    async def close(self) -> None:
        await self._steps.__aexit__(None, None, None)
        await self._client.close()


def _note(step: MultiplexStep, numbers: dict[int, int], seen: Seen) -> None:
    """Give each request its tokens."""
    now = time.perf_counter()
    handles = step.handles
    if step.token_counts:
        pairs = zip(step.handles, step.token_counts, strict=True)
        handles = [handle for handle, count in pairs for _ in range(count)]
    tokens, times, logprobs = seen.tokens, seen.times, seen.logprobs
    for handle in step.handles:
        times[numbers[handle]].append(now)
    for handle, token in zip(handles, step.token_ids, strict=True):
        tokens[numbers[handle]].append(token)
    if step.logprobs is not None:
        # All requests of a case ask for them, so every entry has them.
        for handle, logprob in zip(handles, step.logprobs.logprobs, strict=True):
            logprobs[numbers[handle]].append(logprob)


def make() -> MultiplexContender:
    """Make the contender."""
    return MultiplexContender()
