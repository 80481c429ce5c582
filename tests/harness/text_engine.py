"""An engine that plays a script, for what is built on `tokenwire.text`."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from tokenwire import Delta, FinishReason, GenerateResult, SamplingParams, SequenceOutput, Usage
from tokenwire.text._carrier import Started


class Engine:
    """Plays tokens in chunks; an aborted request gets as many more chunks as `overrun` says."""

    def __init__(
        self,
        chunks: Sequence[Sequence[int]],
        *,
        finish_reason: FinishReason = FinishReason.LENGTH,
        stop_token_id: int | None = None,
        overrun: int = 0,
        fails: dict[int, Exception] | None = None,
        abort_error: Exception | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.finish_reason = finish_reason
        self.stop_token_id = stop_token_id
        self.overrun = overrun
        self.fails = fails or {}
        self.abort_error = abort_error
        self.step_time = 0.0
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.options: list[dict[str, Any]] = []
        self.aborts = 0
        self.closed = 0
        self.has_started = asyncio.Event()
        self.has_closed = asyncio.Event()

    def usage(self, count: int) -> Usage:
        return Usage(prompt_tokens=len(self.prompts[-1]), completion_tokens=count, cached_tokens=3)

    async def generate(self, prompt: list[int], params: SamplingParams, /, **options: Any) -> GenerateResult:
        started = self.start(prompt, params, **options)
        tokens: list[int] = []
        try:
            async for delta in started.deltas:
                tokens += delta.token_ids
        finally:
            await started.deltas.aclose()
        end = SequenceOutput(
            index=0, token_ids=tokens, finish_reason=delta.finish_reason, stop_token_id=delta.outputs[0].stop_token_id
        )
        return GenerateResult(request_id="r", outputs=[end], usage=self.usage(len(tokens)))

    def start(self, prompt: list[int], params: SamplingParams, /, **options: Any) -> Started:
        self.prompts.append(prompt)
        self.params.append(params)
        self.options.append(options)
        self.has_started.set()
        deltas = Deltas(self)
        return Started(deltas, deltas.abort)


class Deltas:
    def __init__(self, engine: Engine) -> None:
        self.request_id = "r"
        self._engine = engine
        self._left = list(engine.chunks)
        self._number = 0
        self._count = 0
        self._finish_reason = engine.finish_reason
        self._has_ended = False

    async def abort(self) -> None:
        self._engine.aborts += 1
        if self._engine.abort_error is not None:
            raise self._engine.abort_error
        del self._left[self._engine.overrun :]
        self._finish_reason = FinishReason.ABORT

    async def aclose(self) -> None:
        self._engine.closed += 1
        self._engine.has_closed.set()
        self._has_ended = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        await asyncio.sleep(self._engine.step_time)
        if self._has_ended:
            raise StopAsyncIteration
        if self._number in self._engine.fails:
            self._has_ended = True
            raise self._engine.fails[self._number]
        self._number += 1
        tokens = list(self._left.pop(0)) if self._left else []
        self._count += len(tokens)
        if self._left:
            return Delta(request_id="r", outputs=[SequenceOutput(index=0, token_ids=tokens)])
        self._has_ended = True
        stop_token = self._engine.stop_token_id if self._finish_reason is FinishReason.STOP else None
        output = SequenceOutput(index=0, token_ids=tokens, finish_reason=self._finish_reason, stop_token_id=stop_token)
        return Delta(request_id="r", outputs=[output], usage=self._engine.usage(self._count))
