"""AsyncLLM in the process of the caller: `generate()` of all requests, merged into one queue.

Without a transport, this is the lower bound for servers that use vLLM's output processor.
"""

import asyncio
import gc
import itertools
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from bench import engine
from bench.cases import Case
from bench.contenders.base import Contender
from bench.measure import Received

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class InProcessContender(Contender):
    """The engine in this process."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @override
    async def open(self, address: str) -> None:
        model, _, step_ms = address.rpartition("@")
        args = AsyncEngineArgs(**engine.arguments(model, float(step_ms)))
        self._llm: Any = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
        gc.collect()
        gc.freeze()

    @override
    async def run(self, case: Case, prompts: list[list[int]], received: Received) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=case.output_tokens,
            ignore_eos=True,
            logprobs=case.logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY if case.unary else RequestOutputKind.DELTA,
        )
        merged: asyncio.Queue[tuple[int, CompletionOutput]] = asyncio.Queue()

        async def one(number: int, prompt: list[int]) -> None:
            request_id = f"in-process-{next(self._numbers)}"
            async for output in self._llm.generate(tokens_input(prompt), params, request_id):
                merged.put_nowait((number, output.outputs[0]))

        tasks = [asyncio.create_task(one(number, prompt)) for number, prompt in enumerate(prompts)]
        live = len(prompts)
        while live:
            number, completion = await merged.get()
            if completion.token_ids:
                received.times[number].append(time.perf_counter())
                received.tokens[number].extend(completion.token_ids)
            if completion.logprobs is not None:
                pairs = zip(completion.token_ids, completion.logprobs, strict=True)
                received.logprobs[number].extend(at[token].logprob for token, at in pairs)
            live -= completion.finish_reason is not None
        await asyncio.gather(*tasks)

    @override
    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)


def make() -> InProcessContender:
    """Create the contender."""
    return InProcessContender()
