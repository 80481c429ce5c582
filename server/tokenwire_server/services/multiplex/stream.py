"""A Multiplex stream: its caller's actions in, its requests' events out."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import multiplex_pb2
from tokenwire_server.access.caller import Caller
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError, Violation, invalid_field
from tokenwire_server.requests.admission import admit, number_of_sequences
from tokenwire_server.requests.registry import LiveRequest, Registry
from tokenwire_server.requests.slow_readers import Reader
from tokenwire_server.services.multiplex.handle import HandleSink
from tokenwire_server.services.multiplex.pending import Pending

_MAX_ABORT_HANDLES = 10_000
"""Most handles of one abort, as of the ids of an Abort call, unless the stream may have more live requests."""
_PAUSE_EVERY = 8
"""Submits after which the event loop gets a turn, so that a burst does not hold up running requests."""


class MultiplexStream(Reader):
    """One caller's stream. `run` yields its messages; leaving it lets go of all its requests, in one engine call."""

    def __init__(
        self, engine: Engine, registry: Registry, caller: Caller, *, check: Callable[[], None], max_requests: int
    ) -> None:
        """Make a stream.

        Args:
            engine: the engine.
            registry: the registry of live requests.
            caller: whose stream it is.
            check: raises the RequestError of a server that takes no requests now.
            max_requests: most live requests.

        """
        super().__init__()
        self._engine = engine
        self._registry = registry
        self._caller = caller
        self._check = check
        self._max_requests = max_requests
        self._handles: dict[int, HandleSink] = {}
        self._pending = Pending(engine.at_step_end)
        self._half_closed = False
        self._given_up: RequestError | None = None

    async def run(self, actions: AsyncIterator[pb.MultiplexRequest]) -> AsyncGenerator[pb.MultiplexResponse, None]:
        """Act on the caller's messages and yield the stream's own, until the caller is done and its requests are too."""
        reader = asyncio.create_task(self._read(actions))
        reader.add_done_callback(lambda _: self._pending.wake())
        try:
            while True:
                if self._given_up is not None:
                    raise self._given_up
                message = self._pending.take()
                if message is not None:
                    self.blocked_since = time.monotonic()
                    yield message
                    self.blocked_since = None
                elif reader.done() and not (self._half_closed and self._handles):
                    # What ended the reader early ends the stream.
                    await reader
                    return
                else:
                    await self._pending.wait()
        finally:
            reader.cancel()
            self._drop_all()

    def waiting(self) -> int:
        """Return the number of values that wait to be written."""
        return self._pending.waiting()

    def give_up(self, error: RequestError) -> None:
        """Let go of all requests and fail with the error."""
        self._given_up = error
        self._drop_all()
        self._pending.clear()

    def _drop_all(self) -> None:
        live = map(self._find, self._handles.values())
        self._registry.drop(*(request for request in live if request is not None))
        self._handles.clear()

    def _find(self, sink: HandleSink) -> LiveRequest | None:
        """Return the live request of a handle; None where it has none, and another one may have its id."""
        live = self._registry.find(self._caller, sink.request_id)
        return live if live is not None and live.sink is sink else None

    async def _read(self, actions: AsyncIterator[pb.MultiplexRequest]) -> None:
        count = 0
        async for action in actions:
            if self._given_up is not None:
                # Answers would heap up for a caller who does not read them.
                return
            match action.WhichOneof("action"):
                case "submit":
                    await self._submit(action.submit)
                case "abort":
                    self._abort(action.abort)
                case _:
                    self._pending.reject(0, invalid_field("action", "must be set to an action that this server knows"))
            count += 1
            if count % _PAUSE_EVERY == 0:
                await asyncio.sleep(0)
        self._half_closed = True

    async def _submit(self, submit: multiplex_pb2.MultiplexSubmit) -> None:
        handle, message = submit.handle, submit.input
        try:
            self._check_submit(submit)
        except RequestError as error:
            self._engine.release_remote_prefill(message)
            self._pending.reject(handle, error)
            return
        if not message.request_id:
            message.request_id = uuid.uuid4().hex
        sink = HandleSink(handle, message.request_id, len(message.prompt_token_ids), self._pending, self._on_end)
        self._handles[handle] = sink
        try:
            live = await admit(
                self._engine, self._registry, self._caller, message, sink, stream=True, path="submit.input"
            )
        except RequestError as error:
            del self._handles[handle]
            self._pending.reject(handle, error)
            return
        if sink.internal_id:
            sink.accept()
        else:
            assert live.outcome is not None
            sink.end_on_arrival(number_of_sequences(message))

    def _check_submit(self, submit: multiplex_pb2.MultiplexSubmit) -> None:
        handle = submit.handle
        if handle in self._handles:
            reason = f"submit.handle: a live request of this stream has the handle {handle}; it goes on"
            violation = Violation("submit.handle", "must differ from the handles of all live requests of the stream")
            raise RequestError(Reason.HANDLE_IN_USE, reason, (violation,))
        self._caller.check()
        self._check()
        if len(self._handles) >= self._max_requests:
            raise RequestError(
                Reason.QUEUE_FULL, f"the stream has its most live requests, {self._max_requests}; open another one"
            )
        if not submit.HasField("input"):
            raise invalid_field("submit.input", "must be set")

    def _abort(self, abort: multiplex_pb2.MultiplexAbort) -> None:
        most = max(_MAX_ABORT_HANDLES, self._max_requests)
        if not 1 <= len(abort.handles) <= most:
            # Each unknown one would be answered, and a message may name millions.
            self._pending.reject(0, invalid_field("abort.handles", f"must name 1 to {most} handles"))
            return
        requests = []
        for handle in abort.handles:
            sink = self._handles.get(handle)
            live = None if sink is None else self._find(sink)
            if live is None:
                error = RequestError(Reason.UNKNOWN_HANDLE, f"no live request of this stream has the handle {handle}")
                self._pending.reject(handle, error)
            else:
                requests.append(live)
        self._registry.abort_soon(requests)

    def _on_end(self, sink: HandleSink, finishes: list[multiplex_pb2.MultiplexFinish]) -> None:
        """Settle a request before its caller is told, so that it may use handle and id again at once."""
        if self._handles.get(sink.handle) is sink:
            del self._handles[sink.handle]
        if (live := self._find(sink)) is not None:
            self._registry.finish(live, finishes)
