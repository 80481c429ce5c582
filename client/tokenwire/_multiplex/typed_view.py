"""A Multiplex stream as a typed stream for each request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from tokenwire._connection import Connection, Metadata
from tokenwire._errors import ClientClosedError, FieldViolation, InternalError, TokenwireError
from tokenwire._input import GenerationOptions, generation_input
from tokenwire._multiplex.backpressure import Backpressure
from tokenwire._multiplex.call import MultiplexCall
from tokenwire._multiplex.request import MultiplexedRequest
from tokenwire._multiplex.step import MultiplexStep
from tokenwire._results import Delta, GenerateResult
from tokenwire._sampling_params import SamplingParams
from tokenwire._wire import invalid

DEFAULT_MAX_BUFFERED_TOKENS = 262_144


class Multiplex:
    """Many requests on one stream, each with a typed stream of its own.

    Use it with `async with`; leaving the block ends what is still open, on the server too. What has ended by then can
    still be read. Where the connection breaks or the call ends, each open stream raises an error of its own, once.

    Slow readers: while more than `max_buffered_tokens` tokens wait to be read and nobody waits for more, nothing is
    taken from the connection, so that the server merges steps; it ends a stream that stands still for too long with
    SlowReaderError. While somebody waits, in a stream without news, in `result()` or in `drain()`, messages are taken
    in spite of the limit, since the awaited one may lie behind others. So no order of reading blocks for ever, and what
    is held is at most what the open requests may generate.

    Submits wait in memory until the connection takes them: to bound that is up to who submits.
    """

    def __init__(
        self, connection: Connection, timeout: float | None, metadata: Metadata | None, max_buffered_tokens: int
    ) -> None:
        if max_buffered_tokens < 1:
            raise invalid(FieldViolation("max_buffered_tokens", f"must be at least 1, not {max_buffered_tokens}"))
        self._call = MultiplexCall(connection, timeout, metadata)
        self._backpressure = Backpressure(max_buffered_tokens)
        self._requests: dict[int, MultiplexedRequest] = {}
        self._has_failed = False
        self._reader: asyncio.Task[None] | None = None

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerationOptions],
    ) -> "MultiplexedStream":
        """Start a request and give its stream, without waiting. The arguments are those of `AsyncClient.generate`.

        Raises InvalidArgumentError and ResourceExhaustedError for what cannot be sent, ClientClosedError outside of
        the block and after `done_submitting`, and what ended the call where it has ended. What the server refuses is
        raised by the stream.
        """
        message = generation_input(prompt_token_ids, sampling_params, **options)
        request = MultiplexedRequest(message, self._backpressure)
        request.handle = self._call.submit(message)
        self._requests[request.handle] = request
        return MultiplexedStream(request, self._abort, self._leave)

    def done_submitting(self) -> None:
        """Take no more submits; the server ends the call after the last request. Aborts are still sent."""
        self._call.done_submitting()

    async def drain(self) -> None:
        """Take no more submits, and wait until all requests have ended. Raises what ended the call before that."""
        if self._reader is None:
            raise self._call.error()
        self._call.done_submitting()
        self._backpressure.reader_waits()
        try:
            await asyncio.wait([self._reader])
        finally:
            self._backpressure.reader_resumes()
        if self._has_failed:
            raise self._call.error()

    async def __aenter__(self) -> Self:
        self._call.open()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._call.close()
        if self._reader is not None:
            self._reader.cancel()  # it may wait for room
            await asyncio.wait([self._reader])
            if not self._reader.cancelled():
                self._reader.result()

    async def _read(self) -> None:
        """Bring what comes to the requests, until the call ends."""
        try:
            while (step := await self._call.next_step()) is not None:
                self._bring(step)
                if self._backpressure.is_paused:
                    await self._backpressure.wait_until_resumed()
        except TokenwireError:
            pass  # each request gives an error of its own
        except ValueError as error:
            self._call.end(partial(InternalError, f"the server sent a step that breaks the contract: {error}"))
        finally:
            self._call.end(partial(InternalError, "the multiplex has ended by a bug in the client"))
            self._has_failed = bool(self._requests)
            for request in self._requests.values():
                request.fail(self._call.error)
            self._requests.clear()

    def _bring(self, step: MultiplexStep) -> None:
        """Bring what a step tells to the requests; those that were left are no longer there. Raises ValueError."""
        requests = self._requests
        num_tokens = 0
        if not step.indexes and not step.token_counts and step.logprobs is None:
            # The bulk of a stream; this loop is what a token costs.
            for handle, token_id in zip(step.handles, step.token_ids, strict=True):
                request = requests.get(handle)
                if request is not None:
                    num_tokens += 1
                    request.first.token_ids.append(token_id)
                    if request.waiter is not None:
                        request.wake()
        else:
            for handle, index, token_ids, logprobs in step.runs():
                request = requests.get(handle)
                if request is not None:
                    num_tokens += len(token_ids)
                    request.sequence(index).add(token_ids, logprobs)
                    request.wake()
        part = step.prompt_logprobs
        if part is not None and part.handle in requests:
            num_tokens += len(part.prompt_logprobs.logprobs)
            requests[part.handle].add_prompt_logprobs(part.prompt_logprobs)
        # Counted before the readers run: they take what is there by then.
        self._backpressure.unread_tokens += num_tokens
        for finish in step.finished:
            request = requests.pop(finish.handle, None) if finish.last else requests.get(finish.handle)
            if request is not None:
                request.finish(finish)
        for refused in (*step.rejected, *step.failed):
            request = requests.pop(refused.handle, None)
            if request is not None:
                request.fail(partial(copy, refused.status))

    def _abort(self, request: MultiplexedRequest) -> None:
        if self._requests.get(request.handle) is request:
            self._call.abort([request.handle])

    def _leave(self, request: MultiplexedRequest) -> None:
        """Forget a request, and end it on the server if it still runs."""
        self._abort(request)
        if self._requests.get(request.handle) is request:
            del self._requests[request.handle]
        request.drop()


class MultiplexedStream(AsyncIterator[Delta]):
    """The deltas of one request of a `Multiplex`, or its result. Leaving it early ends the request on the server.

    `async with` is the form that is guaranteed; `aclose()`, cancelling the task that reads and dropping the object end
    the request too, as with `AsyncDeltaStream`. The other requests go on. For one reader at a time.

    A delta holds all that has come since the one before. Where prompt log probabilities were asked for, the first delta
    waits for all of them. A sequence's sampling mask comes whole, with its finish, and the sum of its log probabilities
    with the finish only.
    """

    def __init__(
        self,
        request: MultiplexedRequest,
        abort: Callable[[MultiplexedRequest], None],
        leave: Callable[[MultiplexedRequest], None],
    ) -> None:
        self.request_id = request.request_id
        """The request's id, for `AsyncClient.abort`."""
        self.handle = request.handle
        """The request's number on the wire, another request's after the end."""
        self._request = request
        self._result: GenerateResult | None = None
        self._abort = abort
        self._leave = leave
        self._loop = asyncio.get_running_loop()

    def abort(self) -> None:
        """Abort the request, without waiting: the stream ends with ABORT, after the tokens so far."""
        self._abort(self._request)

    async def result(self) -> GenerateResult:
        """Wait for the end and give the whole answer. Costs the caller less than reading deltas.

        Raises what `__anext__` raises, and RuntimeError where deltas were read before.
        """
        request = self._request
        if self._result is None:
            if not request.is_whole:
                raise RuntimeError("deltas were read, or the stream was left: the result is no longer whole")
            if not request.has_ended:
                try:
                    await request.end()
                except asyncio.CancelledError:
                    self._leave(request)
                    raise
                if not request.is_whole:
                    raise ClientClosedError("the stream was closed while its result was awaited")
            error = request.error()
            if error is not None:
                raise error
            self._result = request.take_result()
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Give the next delta. Raises StatusError, UnreachableError and ClientClosedError."""
        request = self._request
        while (delta := request.take_delta()) is None:
            if request.has_ended:
                error = request.take_error()
                raise StopAsyncIteration if error is None else error
            try:
                await request.news()
            except asyncio.CancelledError:
                self._leave(request)
                raise
        return delta

    async def aclose(self) -> None:
        """End the request, if it still runs, and forget what was not read. A read in another task ends there."""
        self._leave(self._request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(self._request)

    def __del__(self) -> None:
        # Garbage may be collected in any thread; a loop that is closed has ended its calls.
        request = self._request
        if not request.has_ended or request.num_unread:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._leave, request)
