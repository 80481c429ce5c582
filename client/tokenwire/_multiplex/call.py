"""The gRPC call of a Multiplex stream: sends actions in order, receives messages, and ends once."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

import grpc.aio

from tokenwire._connection import Connection, Metadata, task_is_cancelled
from tokenwire._errors import ClientClosedError, InternalError, MessageTooLargeError, TokenwireError
from tokenwire._multiplex.handles import Handles
from tokenwire._multiplex.step import MultiplexPromptLogprobs, MultiplexStep
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire.v1.multiplex_pb2 import MultiplexAbort, MultiplexSubmit

# The contract's maximum for one MultiplexAbort.
_MAX_ABORT_HANDLES = 10_000

# Maximum size of a handle in a message, and of what surrounds the handles, in bytes.
_HANDLE_BYTES = 5
_ABORT_OVERHEAD_BYTES = 16

_Call = grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]


class MultiplexCall:
    """One Multiplex call. Submits are queued in memory until they are sent.

    The sending side is closed after `done_submitting` and the end of the last request, since aborts may be sent until
    then.
    """

    def __init__(self, connection: Connection, timeout: float | None, metadata: Metadata | None) -> None:
        """Make a call, which `open` starts.

        Args:
            connection: the connection to the server.
            timeout: gRPC deadline of the whole stream, in seconds. None: no deadline.
            metadata: metadata of the call, sent after the client's own. None: nothing is added.

        """
        self._connection = connection
        self._timeout = timeout
        self._metadata = metadata
        self._handles = Handles()
        self._unsent: deque[pb.MultiplexRequest] = deque()
        limit = connection.max_send_message_bytes
        fitting = _MAX_ABORT_HANDLES if limit < 0 else (limit - _ABORT_OVERHEAD_BYTES) // _HANDLE_BYTES
        self._max_abort_handles = max(1, min(_MAX_ABORT_HANDLES, fitting))
        self._has_unsent = asyncio.Event()
        self._accepts_submits = True
        self._call: _Call | None = None
        self._has_ended = asyncio.Event()
        self._is_regular_end = False
        self._messages: AsyncIterator[pb.MultiplexResponse]
        self._writer: asyncio.Task[None]
        self._error: Callable[[], TokenwireError] | None = partial(
            ClientClosedError, "a multiplex is open only inside its `async with` block"
        )

    def open(self) -> None:
        """Start the call. Raises ClientClosedError."""
        if self._call is not None:
            raise RuntimeError("a multiplex can be opened only once")
        self._call = self._connection.start(self._connection.stub.Multiplex, None, self._timeout, self._metadata)
        # Not call.read(), which checks the status first and would drop messages that were received before it.
        self._messages = aiter(self._call)
        has_ended = self._has_ended
        self._call.add_done_callback(lambda _: has_ended.set())
        self._writer = asyncio.create_task(self._write(self._call))
        self._error = None

    def error(self) -> TokenwireError:
        """Make the error that ended the call. A new one each time, since a raised exception keeps its traceback."""
        return ClientClosedError("the multiplex has ended") if self._error is None else self._error()

    def submit(self, message: GenerationInput) -> int:
        """Queue a request.

        Returns:
            Its handle.

        Raises:
            ClientClosedError: no more submits are accepted.
            MessageTooLargeError: the request is too large.
            TokenwireError: the error that ended the call.

        """
        if self._error is not None:
            raise self._error()
        if not self._accepts_submits:
            raise ClientClosedError("the multiplex accepts no more submits: done_submitting() was called")
        handle = self._handles.take()
        request = pb.MultiplexRequest(submit=MultiplexSubmit(handle=handle, input=message))
        size, limit = request.ByteSize(), self._connection.max_send_message_bytes
        if 0 <= limit < size:
            self._handles.put_back(handle)
            # gRPC would end the call, and all other requests with it.
            raise MessageTooLargeError(f"the request has {size} bytes, more than max_send_message_bytes, {limit}")
        self._unsent.append(request)
        self._has_unsent.set()
        return handle

    def abort(self, handles: Iterable[int]) -> None:
        """Queue aborts of requests. Handles that are not live, or whose abort has been queued before, are skipped."""
        if self._error is not None:
            return
        aborted = self._handles.abort(handles)
        while aborted:
            last = self._unsent[-1].abort.handles if self._unsent and self._unsent[-1].HasField("abort") else ()
            room = self._max_abort_handles - len(last)
            if last and room > 0:
                self._unsent[-1].abort.handles.extend(aborted[:room])
            else:
                room = self._max_abort_handles
                self._unsent.append(pb.MultiplexRequest(abort=MultiplexAbort(handles=aborted[:room])))
            aborted = aborted[room:]
        self._has_unsent.set()

    def done_submitting(self) -> None:
        """Accept no more submits. The server ends the stream after the last request."""
        self._accepts_submits = False
        self._has_unsent.set()

    async def next_step(self) -> MultiplexStep | None:
        """Return the next step, None at the end. Raises the error that ended the call, once."""
        if self._call is None:
            raise self.error()
        # The caller has processed the previous step.
        self._handles.recycle()
        while self._error is None:
            message = await self._next_message()
            if message is None:
                break
            event = message.WhichOneof("event")
            if event == "step":
                return self._take(message)
            if event == "prompt_logprobs":
                return MultiplexStep(prompt_logprobs=MultiplexPromptLogprobs.from_proto(message.prompt_logprobs))
            # An unknown event, from a newer server.
        return None

    async def wait_closed(self) -> None:
        """Wait until the call has ended. Raises the error that ended it; returns after a regular end."""
        if self._call is None:
            raise self.error()
        await self._has_ended.wait()
        error = await self._status_error(self._call) if self._error is None else self._error()
        if error is not None and not self._is_regular_end:
            raise error

    def end(self, error: Callable[[], TokenwireError], *, is_regular: bool = False) -> None:
        """Cancel the call unless it has ended. `error` makes the error that ended it."""
        if self._call is not None and self._error is None:
            self._error = error
            self._is_regular_end = is_regular
            self._has_ended.set()
            self._unsent.clear()
            self._writer.cancel()
            self._call.cancel()

    async def close(self) -> None:
        """Cancel the call, whose requests the server aborts, and wait for its tasks."""
        self.end(partial(ClientClosedError, "the multiplex is closed"), is_regular=True)
        if self._call is not None:
            await asyncio.wait([self._writer])
            if not self._writer.cancelled():
                self._writer.result()

    def _take(self, message: pb.MultiplexResponse) -> MultiplexStep:
        try:
            step = MultiplexStep.from_proto(message.step)
        except ValueError as error:
            self.end(partial(InternalError, f"the server sent a step that breaks the contract: {error}"))
            raise self.error() from None
        ended = [finish.handle for finish in step.finished if finish.last]
        ended += [refused.handle for refused in (*step.rejected, *step.failed)]
        for handle in ended:
            self._handles.end(handle)
        if not self._handles:
            self._has_unsent.set()
        return step

    async def _next_message(self) -> pb.MultiplexResponse | None:
        """Return the next message, None at the regular end."""
        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            if not self._handles:
                self.end(partial(ClientClosedError, "the multiplex has ended"), is_regular=True)
                return None
            self.end(partial(InternalError, "the server ended the stream before its requests"))
        except grpc.aio.AioRpcError as error:
            self.end(partial(self._connection.error, error))
        except asyncio.CancelledError:
            # grpc.aio raises this if the reading task is cancelled, the client is closed, or close() is called.
            cancelled = partial(ClientClosedError, "the task that read the multiplex was cancelled")
            self.end(self._client_closed_error if self._connection.closed else cancelled)
            if task_is_cancelled():
                raise
        raise self.error() from None

    async def _status_error(self, call: _Call) -> TokenwireError | None:
        """Return the error of a call that has ended, whose messages have not been read to their end."""
        code = await call.code()
        if self._connection.closed:
            return self._client_closed_error()
        if code is grpc.StatusCode.OK:
            return None
        trailing, details = await call.trailing_metadata(), await call.details()
        return self._connection.error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))

    def _client_closed_error(self) -> ClientClosedError:
        return ClientClosedError(f"the client of {self._connection.target} was closed")

    async def _write(self, call: _Call) -> None:
        """Send the queued messages one by one, as gRPC requires."""
        # If the call has ended, grpc.aio raises any of these here, and the reading side gets the status.
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await call.wait_for_connection()
            while not call.done():
                while self._unsent:
                    await _send(call, self._unsent.popleft())
                if not self._accepts_submits and not self._handles:
                    await call.done_writing()
                    return
                self._has_unsent.clear()
                await self._has_unsent.wait()


async def _send(call: _Call, request: pb.MultiplexRequest) -> None:
    """Send a message without call.write(), which may lose the status of a call that the server has just ended.

    If the call no longer accepts messages and its status has not been read yet, call.write() sets INTERNAL as the
    status (grpc.aio 1.74 to 1.85). A caller with many queued submits would not learn why the server refused the call.
    """
    inner = getattr(call, "_cython_call", None)
    if inner is None:
        await call.write(request)
    else:
        await inner.send_serialized_message(request.SerializeToString())
