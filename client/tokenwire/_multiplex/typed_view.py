"""The typed view of a Multiplex stream: a stream of deltas per request."""

import asyncio
from collections.abc import Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from tokenwire._connection import Connection, Metadata
from tokenwire._errors import FieldViolation, InternalError, TokenwireError
from tokenwire._input import GenerationOptions, generation_input
from tokenwire._multiplex.backpressure import Backpressure
from tokenwire._multiplex.call import MultiplexCall
from tokenwire._multiplex.request import MultiplexedRequest
from tokenwire._multiplex.step import MultiplexStep
from tokenwire._multiplex.stream import MultiplexedStream
from tokenwire._sampling_params import SamplingParams
from tokenwire._wire import invalid

# About 10 MB: a token id takes 36 bytes as an int in a list.
DEFAULT_MAX_BUFFERED_TOKENS = 262_144


class Multiplex:
    """Many requests on one stream, each read as a stream of deltas.

    Use it in an `async with` block; leaving the block aborts the requests in flight on the server. Output that has
    arrived by then can still be read. If the connection breaks or the call ends, the stream of each request in flight
    raises its own exception, once.

    Backpressure: while more than `max_buffered_tokens` tokens are unread and nobody waits for more, no messages are
    read from the connection, and the server merges steps. It ends a stream that is not read for too long with
    SlowReaderError. While a task waits, for the next delta of a stream, in `result()` or in `drain()`, messages are
    read regardless of the limit, since the awaited one may be behind others. So reading in any order never deadlocks,
    and the memory is bounded by what the requests in flight may generate.

    Submits are queued in memory until they are sent. Bounding their number is up to the caller.
    """

    def __init__(
        self, connection: Connection, timeout: float | None, metadata: Metadata | None, max_buffered_tokens: int
    ) -> None:
        """Make a stream, which `async with` opens.

        Args:
            connection: the connection to the server.
            timeout: gRPC deadline of the whole stream, in seconds. None: no deadline.
            metadata: metadata of the stream, sent after the client's own. None: nothing is added.
            max_buffered_tokens: number of unread tokens above which the connection is not read, at least 1.

        Raises:
            InvalidArgumentError: `max_buffered_tokens` is below 1.

        """
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
    ) -> MultiplexedStream:
        """Start a request and return its stream, without waiting.

        Args:
            prompt_token_ids: token ids of the prompt, at least one, each in the model's vocabulary.
            sampling_params: how to sample. None: the model's defaults.
            **options: fields of `GenerationOptions`, `request_id` and `max_time` for example.

        Returns:
            The request's stream, which raises what the server refuses.

        Raises:
            InvalidArgumentError: a value cannot be encoded.
            MessageTooLargeError: the request exceeds `max_send_message_bytes`.
            ClientClosedError: the block has not been entered or has been left, or `done_submitting` was called.
            TokenwireError: the error that ended the call.

        """
        message = generation_input(prompt_token_ids, sampling_params, **options)
        request = MultiplexedRequest(message, self._backpressure)
        request.handle = self._call.submit(message)
        self._requests[request.handle] = request
        return MultiplexedStream(request, self._abort, self._leave)

    def done_submitting(self) -> None:
        """Accept no more submits. The server ends the call after the last request. Aborts are still sent."""
        self._call.done_submitting()

    async def drain(self) -> None:
        """Accept no more submits and wait until all requests have ended. Raises the error that ended the call early."""
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

    async def wait_closed(self) -> None:
        """Wait until the call has ended, also while no request is in flight. May be awaited by several tasks.

        A connection that breaks is reported at once, within the keepalive times of `ClientOptions` if the server is
        silent. A status that the server sends behind messages is reported once those have been read.

        Raises:
            TokenwireError: the error that ended the call. After a regular end, or if the block is left first, it
                returns.

        """
        await self._call.wait_closed()

    async def __aenter__(self) -> Self:
        self._call.open()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._call.close()
        if self._reader is not None:
            self._reader.cancel()  # it may be paused by backpressure
            await asyncio.wait([self._reader])
            if not self._reader.cancelled():
                self._reader.result()

    async def _read(self) -> None:
        """Dispatch the steps to the requests until the call ends."""
        try:
            while (step := await self._call.next_step()) is not None:
                self._dispatch(step)
                if self._backpressure.is_paused:
                    await self._backpressure.wait_until_resumed()
        except TokenwireError:
            pass  # each request raises its own exception, see below
        except ValueError as error:
            self._call.end(partial(InternalError, f"the server sent a step that breaks the contract: {error}"))
        finally:
            self._call.end(partial(InternalError, "the multiplex ended because of a bug in the client"))
            self._has_failed = bool(self._requests)
            for request in self._requests.values():
                request.fail(self._call.error)
            self._requests.clear()

    def _dispatch(self, step: MultiplexStep) -> None:
        """Dispatch a step to its requests, except those that were left. Raises ValueError for an invalid step."""
        requests = self._requests
        num_tokens = 0
        if not step.indexes and not step.token_counts and step.logprobs is None:
            # Most steps are like this; the cost per token is that of this loop.
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
        # Counted before the readers run, which read everything that has arrived by then.
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
        """Forget a request, and abort it on the server unless it has ended."""
        self._abort(request)
        if self._requests.get(request.handle) is request:
            del self._requests[request.handle]
        request.drop()
