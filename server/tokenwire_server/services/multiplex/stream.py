"""A Multiplex stream: reads the caller's actions and writes the events of its requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import multiplex_pb2
from tokenwire_server.access import caller
from tokenwire_server.errors import RequestError, Violation, internal_error, invalid_field
from tokenwire_server.requests.admission import admit
from tokenwire_server.requests.incoming import IncomingRequest
from tokenwire_server.requests.live_request import LiveRequest
from tokenwire_server.requests.server_state import Serving
from tokenwire_server.requests.slow_readers import Reader
from tokenwire_server.requests.trace_headers import trace_headers
from tokenwire_server.services.host import Host
from tokenwire_server.services.multiplex.handle import HandleSink
from tokenwire_server.services.multiplex.pending import Pending
from tokenwire_server.transport.handlers import ResponseWriter

logger = logging.getLogger(__name__)

_MAX_ABORT_HANDLES = 10_000
"""Maximum number of handles in one abort, as for ids in an Abort call, unless more requests can be in flight."""
_YIELD_EVERY = 8
"""Number of actions after which the task yields to the event loop, so that a burst does not delay other requests."""


class MultiplexStream(Reader):
    """One caller's stream. When `run` exits, all its requests are unregistered and aborted, in one engine call."""

    def __init__(self, host: Host, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Make a stream.

        Args:
            host: the state that the server's services share.
            context: the call.

        Raises:
            RequestError: the server is not accepting requests, or the caller's certificate has no name.

        """
        self._host = host
        self._max_requests = host.config.max_requests_per_stream
        self._max_message_bytes = host.config.max_send_message_bytes
        # The engine and the registry are the same for the whole life of the server.
        self._serving = host.state.accepting()
        self._caller = caller.of(context)
        self._trace_headers = trace_headers(context.invocation_metadata())
        self._writer = ResponseWriter(context)
        self._handles: dict[int, HandleSink] = {}
        self._pending = Pending(self._serving.engine.at_step_end)
        self._half_closed = False
        self._given_up: RequestError | None = None

    async def run(self, actions: AsyncIterator[pb.MultiplexRequest]) -> None:
        """Handle actions and write responses until the caller has half-closed and all its requests have ended.

        Raises:
            RequestError: the stream was not read for too long, or it is idle and the server shuts down.

        """
        reader = asyncio.create_task(self._read(actions))
        reader.add_done_callback(lambda _: self._pending.wake())
        try:
            with self._host.slow_readers.watch(self), self._host.state.notify(self._pending.wake):
                await self._write(reader)
        finally:
            reader.cancel()
            self._unregister_all()

    async def _write(self, reader: "asyncio.Task[None]") -> None:
        while True:
            if self._given_up is not None:
                raise self._given_up
            message = self._pending.take()
            if message is not None:
                await self._writer.write(message)
            elif reader.done() and not (self._half_closed and self._handles):
                # An error that ended the reader ends the stream.
                await reader
                return
            elif not self._handles and (refusal := self._host.state.refusal()) is not None:
                # An idle stream does not hold up the server's end, and its caller learns why it ends.
                raise refusal
            else:
                await self._pending.wait()

    def blocked_since(self) -> float | None:
        """Return the `time.monotonic` time at which the write in progress started; None if there is none."""
        return self._writer.blocked_since

    def waiting(self) -> int:
        """Return the number of values waiting to be written."""
        return self._pending.waiting()

    def give_up(self, error: RequestError) -> None:
        """Abort all requests, discard what is waiting, and fail the stream with the error."""
        self._given_up = error
        self._unregister_all()
        self._pending.clear()

    def _unregister_all(self) -> None:
        for sink in self._handles.values():
            # Also one that is not registered yet: the engine aborts it when it arrives.
            sink.closed = True
        live = map(self._find, self._handles.values())
        self._serving.registry.unregister(*(request for request in live if request is not None))
        self._handles.clear()

    def _find(self, sink: HandleSink) -> LiveRequest | None:
        """Return the live request of a handle; None if it has none, even if another request has its id."""
        live = self._serving.registry.find(self._caller, sink.request_id)
        return live if live is not None and live.sink is sink else None

    async def _read(self, actions: AsyncIterator[pb.MultiplexRequest]) -> None:
        count = 0
        async for action in actions:
            if self._given_up is not None:
                # Responses would accumulate for a caller that does not read them.
                return
            match action.WhichOneof("action"):
                case "submit":
                    await self._submit(action.submit)
                case "abort":
                    self._abort(action.abort)
                case _:
                    self._pending.reject(
                        0, invalid_field("action", "must be set to an action that this server supports")
                    )
            count += 1
            if count % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
        self._half_closed = True

    async def _submit(self, submit: multiplex_pb2.MultiplexSubmit) -> None:
        handle = submit.handle
        sink: HandleSink | None = None
        incoming = IncomingRequest(
            self._host.state, submit.input, path="submit.input", trace_headers=self._trace_headers
        )
        try:
            with incoming:
                serving = self._check_submit(submit)
                sink = self._handles[handle] = HandleSink(handle, self._pending, self._on_end)
                live = await admit(
                    serving, incoming, self._caller, sink, stream=True, max_message_bytes=self._max_message_bytes
                )
        except RequestError as error:
            self._reject(handle, sink, error)
        except Exception:
            # A bug, which ends this submit and not the requests of the whole stream.
            logger.exception("a submit failed unexpectedly")
            self._reject(handle, sink, internal_error())
        else:
            if sink.internal_id:
                sink.accept()
            else:
                sink.end_on_arrival(live.request)

    def _reject(self, handle: int, sink: HandleSink | None, error: RequestError) -> None:
        if sink is None:
            self._pending.reject(handle, error)
        elif self._handles.get(handle) is sink:
            del self._handles[handle]
            self._pending.reject(handle, error)
        # Otherwise the sink has failed before, and has reported that.

    def _check_submit(self, submit: multiplex_pb2.MultiplexSubmit) -> Serving:
        handle = submit.handle
        if handle in self._handles:
            reason = f"submit.handle: handle {handle} is in use by a request in flight, which is not affected"
            violation = Violation(
                "submit.handle", "must differ from the handles of all requests in flight on the stream"
            )
            raise RequestError(Reason.HANDLE_IN_USE, reason, (violation,))
        self._caller.check()
        serving = self._host.state.accepting()
        if len(self._handles) >= self._max_requests:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"the stream has reached its maximum number of requests in flight, {self._max_requests}; "
                "open another stream",
            )
        if not submit.HasField("input"):
            raise invalid_field("submit.input", "must be set")
        return serving

    def _abort(self, abort: multiplex_pb2.MultiplexAbort) -> None:
        most = max(_MAX_ABORT_HANDLES, self._max_requests)
        if not 1 <= len(abort.handles) <= most:
            # Each unknown handle causes a response, and a message can contain millions.
            self._pending.reject(0, invalid_field("abort.handles", f"must contain 1 to {most} handles"))
            return
        requests = []
        for handle in abort.handles:
            sink = self._handles.get(handle)
            live = None if sink is None else self._find(sink)
            if live is None:
                error = RequestError(Reason.UNKNOWN_HANDLE, f"no request in flight on this stream has handle {handle}")
                self._pending.reject(handle, error)
            else:
                requests.append(live)
        self._serving.registry.abort_soon(requests)

    def _on_end(self, sink: HandleSink) -> None:
        """Free the handle and the id before the caller is notified, so that it can reuse both immediately."""
        if self._handles.get(sink.handle) is sink:
            del self._handles[sink.handle]
        if (live := self._find(sink)) is not None:
            self._serving.registry.finish(live)
