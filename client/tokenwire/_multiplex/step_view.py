"""A Multiplex stream step by step, for coordinators that want no task for each request."""

from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

from tokenwire._connection import Connection, Metadata
from tokenwire._input import GenerationOptions, generation_input
from tokenwire._multiplex.call import MultiplexCall
from tokenwire._multiplex.step import MultiplexStep
from tokenwire._sampling_params import SamplingParams


class MultiplexSteps(AsyncIterator[MultiplexStep]):
    """Many requests on one stream, told step by step.

    Use it with `async with`; leaving the block ends what is still open, on the server too. One task reads. Cancelling
    it while it waits for a step ends the stream, as does a timeout around that wait. While nobody reads, the server
    merges steps, and ends a stream that is not read for too long with SlowReaderError.

    Submits wait in memory until the connection takes them: to bound that is up to who submits.
    """

    def __init__(self, connection: Connection, timeout: float | None, metadata: Metadata | None) -> None:
        self._call = MultiplexCall(connection, timeout, metadata)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerationOptions],
    ) -> int:
        """Start a request and give its handle, without waiting. The arguments are those of `AsyncClient.generate`.

        The handle is the request's until the step that tells its last finish, its rejection or its failure; it may be
        given out again once the step after that one is asked for. `return_prompt_token_ids` has no effect here.

        Raises InvalidArgumentError and ResourceExhaustedError for what cannot be sent, ClientClosedError outside of
        the block and after `done_submitting`, and what ended the stream where it has ended. What the server refuses
        comes in a step.
        """
        return self._call.submit(generation_input(prompt_token_ids, sampling_params, **options))

    def abort(self, handles: Iterable[int]) -> None:
        """Abort requests, without waiting: each ends with ABORT in one of the next steps. Those that ended are skipped."""
        self._call.abort(handles)

    def done_submitting(self) -> None:
        """Take no more submits; the iteration ends after the last request. Aborts are still sent."""
        self._call.done_submitting()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MultiplexStep:
        """Wait for the next step. Raises what ended the stream: UnreachableError, StatusError or ClientClosedError."""
        step = await self._call.next_step()
        if step is None:
            raise StopAsyncIteration
        return step

    async def __aenter__(self) -> Self:
        self._call.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._call.close()
