"""tokenwire Multiplex read step by step, for coordinators without a task per request."""

import time

from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.contenders.generate_stream import sampling_params
from bench.measure import Received
from tokenwire import AsyncClient, MultiplexStep, MultiplexSteps


class MultiplexContender(Contender):
    """One Multiplex stream for all requests of all cases."""

    _client: AsyncClient
    _steps: MultiplexSteps

    @override
    async def open(self, address: str) -> None:
        self._client = AsyncClient(address)
        self._steps = await self._client.multiplex_steps().__aenter__()

    @override
    async def run(self, case: Case, prompts: list[list[int]], received: Received) -> None:
        params = sampling_params(case)
        numbers = {self._steps.submit(prompt, params): number for number, prompt in enumerate(prompts)}
        live = len(prompts)
        async for step in self._steps:
            if step.rejected or step.failed:
                raise RuntimeError(f"a request was rejected or has failed: {step}")
            _record(step, numbers, received)
            live -= sum(finish.last for finish in step.finished)
            if not live:
                return
        raise RuntimeError("the stream ended before all requests")

    @override
    async def close(self) -> None:
        await self._steps.__aexit__(None, None, None)
        await self._client.close()


def _record(step: MultiplexStep, numbers: dict[int, int], received: Received) -> None:
    """Record the outputs of each request in a step."""
    now = time.perf_counter()
    handles = step.handles
    if step.token_counts:
        pairs = zip(step.handles, step.token_counts, strict=True)
        handles = [handle for handle, count in pairs for _ in range(count)]
    tokens, times, logprobs = received.tokens, received.times, received.logprobs
    for handle in step.handles:
        times[numbers[handle]].append(now)
    for handle, token in zip(handles, step.token_ids, strict=True):
        tokens[numbers[handle]].append(token)
    if step.logprobs is not None:
        # All requests of a case ask for log probabilities, so every entry has them.
        for handle, logprob in zip(handles, step.logprobs.logprobs, strict=True):
            logprobs[numbers[handle]].append(logprob)


def make() -> MultiplexContender:
    """Create the contender."""
    return MultiplexContender()
