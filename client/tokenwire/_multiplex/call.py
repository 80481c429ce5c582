"""The call under a Multiplex stream: actions go out in order, messages come in, and it ends once."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

import grpc.aio

from tokenwire._connection import Connection, Metadata, task_is_cancelled
from tokenwire._errors import ClientClosedError, InternalError, ResourceExhaustedError, TokenwireError
from tokenwire._multiplex.handles import Handles
from tokenwire._multiplex.step import MultiplexPromptLogprobs, MultiplexStep
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire.v1.multiplex_pb2 import MultiplexAbort, MultiplexSubmit

_Call = grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]


class MultiplexCall:
    """One Multiplex call. What is submitted waits in memory until the connection takes it.

    The caller's side is closed when no more is to be submitted and the last request has ended: until then an abort may
    have to be sent.
    """

    def __init__(self, connection: Connection, timeout: float | None, metadata: Metadata | None) -> None:
        self._connection = connection
        self._timeout = timeout
        self._metadata = metadata
        self._handles = Handles()
        self._unsent: deque[pb.MultiplexRequest] = deque()
        self._something_to_send = asyncio.Event()
        self._takes_submits = True
        self._call: _Call | None = None
        self._messages: AsyncIterator[pb.MultiplexResponse]
        self._writer: asyncio.Task[None]
        self._error: Callable[[], TokenwireError] | None = partial(
            ClientClosedError, "a multiplex is open only inside its `async with` block"
        )

    def open(self) -> None:
        """Start the call. Raises ClientClosedError."""
        if self._call is not None:
            raise RuntimeError("a multiplex is opened once")
        self._call = self._connection.start(self._connection.stub.Multiplex, None, self._timeout, self._metadata)
        # Not call.read(): it looks at the status first, and would drop messages that are still to be read.
        self._messages = aiter(self._call)
        self._writer = asyncio.create_task(self._write(self._call))
        self._error = None

    def error(self) -> TokenwireError:
        """Give what ended the call, a new exception each time: a raised one belongs to who caught it."""
        return ClientClosedError("the multiplex has ended") if self._error is None else self._error()

    def submit(self, message: GenerationInput) -> int:
        """Queue a request and give its handle. Raises what ended the call, ClientClosedError, ResourceExhaustedError."""
        if self._error is not None:
            raise self._error()
        if not self._takes_submits:
            raise ClientClosedError("the multiplex takes no more submits: done_submitting() was called")
        request = pb.MultiplexRequest(submit=MultiplexSubmit(input=message))
        size, limit = request.ByteSize(), self._connection.max_send_message_bytes
        if 0 <= limit < size:
            # gRPC would end the call for it, and with it all other requests.
            raise ResourceExhaustedError(f"the request has {size} bytes, more than max_send_message_bytes, {limit}")
        handle = request.submit.handle = self._handles.take()
        self._unsent.append(request)
        self._something_to_send.set()
        return handle

    def abort(self, handles: Iterable[int]) -> None:
        """Queue the abort of those of the requests that are live."""
        live = [handle for handle in handles if handle in self._handles]
        if not live or self._error is not None:
            return
        if self._unsent and self._unsent[-1].HasField("abort"):
            self._unsent[-1].abort.handles.extend(live)
        else:
            self._unsent.append(pb.MultiplexRequest(abort=MultiplexAbort(handles=live)))
        self._something_to_send.set()

    def done_submitting(self) -> None:
        """Take no more submits, and let the server end the stream after the last request."""
        self._takes_submits = False
        self._something_to_send.set()

    async def next_step(self) -> MultiplexStep | None:
        """Wait for the next message. Raises what ended the call, once; None after that or a regular end."""
        if self._call is None:
            raise self.error()
        # The caller has seen the last step.
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
            # A later server's event.
        return None

    def end(self, error: Callable[[], TokenwireError]) -> None:
        """Cancel the call, if it still runs; `error` is what ended it, unless something else did."""
        if self._call is not None and self._error is None:
            self._error = error
            self._unsent.clear()
            self._writer.cancel()
            self._call.cancel()

    async def close(self) -> None:
        """End the call, which ends its requests on the server, and wait for what belongs to it."""
        self.end(partial(ClientClosedError, "the multiplex is closed"))
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
            self._something_to_send.set()
        return step

    async def _next_message(self) -> pb.MultiplexResponse | None:
        """Give the next message, None at the regular end."""
        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            if not self._handles:
                self.end(partial(ClientClosedError, "the multiplex has ended"))
                return None
            self.end(partial(InternalError, "the server ended the stream before its requests"))
        except grpc.aio.AioRpcError as error:
            self.end(partial(self._connection.error, error))
        except asyncio.CancelledError:
            # Cancelling the task that reads, closing the client and close() all look the same to grpc.aio.
            closed = f"the client of {self._connection.target} was closed" if self._connection.closed else None
            self.end(partial(ClientClosedError, closed or "the multiplex was cancelled by its reader"))
            if task_is_cancelled():
                raise
        raise self.error() from None

    async def _write(self, call: _Call) -> None:
        """Send what is queued, one message after the other, as gRPC demands."""
        # Where the call has ended, the reading side learns why; grpc.aio's word for it here is any of these.
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await call.wait_for_connection()
            while not call.done():
                while self._unsent:
                    await _send(call, self._unsent.popleft())
                if not self._takes_submits and not self._handles:
                    await call.done_writing()
                    return
                self._something_to_send.clear()
                await self._something_to_send.wait()


async def _send(call: _Call, request: pb.MultiplexRequest) -> None:
    """Send a message, without call.write(): where the server has just ended the call, that loses the server's status.

    It finds that the call no longer takes messages before the status is read, and sets INTERNAL in its place (grpc.aio
    1.74 to 1.85): a server that refuses a caller with a thousand submits could not say why.
    """
    inner = getattr(call, "_cython_call", None)
    if inner is None:
        await call.write(request)
    else:
        await inner.send_serialized_message(request.SerializeToString())
