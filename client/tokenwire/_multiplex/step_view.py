"""The step view of a Multiplex stream, for coordinators that do not want a task per request."""

from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

from tokenwire._connection import Connection, Metadata
from tokenwire._input import GenerationOptions, generation_input
from tokenwire._multiplex.call import MultiplexCall
from tokenwire._multiplex.step import MultiplexStep
from tokenwire._sampling_params import SamplingParams


class MultiplexSteps(AsyncIterator[MultiplexStep]):
    """Many requests on one stream, read step by step.

    Use it in an `async with` block; leaving the block aborts the requests in flight on the server. One task reads.
    Cancelling it while it waits for a step ends the stream, and so does a timeout around that wait. While nobody reads,
    the server merges steps; it ends a stream that is not read for too long with SlowReaderError.

    Submits are queued in memory until they are sent. Bounding their number is up to the caller.
    """

    def __init__(self, connection: Connection, timeout: float | None, metadata: Metadata | None) -> None:
        """Make a stream, which `async with` opens.

        Args:
            connection: the connection to the server.
            timeout: gRPC deadline of the whole stream, in seconds. None: no deadline.
            metadata: metadata of the stream, sent after the client's own. None: nothing is added.

        """
        self._call = MultiplexCall(connection, timeout, metadata)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerationOptions],
    ) -> int:
        """Start a request and return its handle, without waiting.

        The handle belongs to the request until the step with its last finish, its rejection or its failure. It may be
        reused after the next step has been requested.

        Args:
            prompt_token_ids: token ids of the prompt, at least one, each in the model's vocabulary.
            sampling_params: how to sample. None: the model's defaults.
            **options: fields of `GenerationOptions`. `return_prompt_token_ids` has no effect here.

        Returns:
            The request's handle. What the server refuses is reported in a step.

        Raises:
            InvalidArgumentError: a value cannot be encoded.
            MessageTooLargeError: the request exceeds `max_send_message_bytes`.
            ClientClosedError: the block has not been entered or has been left, or `done_submitting` was called.
            TokenwireError: the error that ended the stream.

        """
        return self._call.submit(generation_input(prompt_token_ids, sampling_params, **options))

    def abort(self, handles: Iterable[int]) -> None:
        """Abort requests without waiting: each ends with ABORT in a later step. Ended ones are skipped."""
        self._call.abort(handles)

    def done_submitting(self) -> None:
        """Accept no more submits. The iteration ends after the last request. Aborts are still sent."""
        self._call.done_submitting()

    async def wait_closed(self) -> None:
        """Wait until the call has ended, also while no request is in flight. May be awaited by several tasks.

        A connection that breaks is reported at once, within the keepalive times of `ClientOptions` if the server is
        silent. A status that the server sends behind messages is reported once those have been read.

        Raises:
            TokenwireError: the error that ended the call. After a regular end, or if the block is left first, it
                returns.

        """
        await self._call.wait_closed()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MultiplexStep:
        """Return the next step. Raises StatusError, UnreachableError and ClientClosedError."""
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
