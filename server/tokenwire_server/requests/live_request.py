"""A request in flight."""

import asyncio
from typing import TYPE_CHECKING

from tokenwire.v1.generation_pb2 import FinishReason
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.engine.sink import Sink

if TYPE_CHECKING:
    from tokenwire.v1.engine_service_pb2 import AbortOutcome


class LiveRequest:
    """A request from its registration until its outcome is decided."""

    __slots__ = ("_added", "_waking", "client", "cut_short", "key", "outcome", "request", "sink", "timer")

    def __init__(self, caller: Caller, request: EngineRequest, sink: Sink) -> None:
        """Make a live request; the registry does this.

        Args:
            caller: the caller of the RPC.
            request: the request.
            sink: receives the request's outputs.

        """
        self.client = caller.client
        self.key = (caller.principal, request.request_id)
        self.request = request
        self.sink = sink
        self.outcome: AbortOutcome.ValueType | None = None
        """The outcome that Abort reports; None while the request is in flight."""
        self.cut_short: FinishReason.ValueType | None = None
        """Why the request is being aborted, ABORT or TIME_LIMIT; the first reason counts. None if it is not."""
        self.timer: asyncio.TimerHandle | None = None
        """Aborts the request when its `max_time` has expired."""
        self._added: asyncio.Future[None] | None = None
        self._waking = False

    @property
    def engine_id(self) -> str:
        """The request's id in vLLM, unique among requests in flight: ids and principals contain no spaces."""
        principal, request_id = self.key
        return f"{principal} {request_id}" if principal else request_id

    def cut(self, reason: FinishReason.ValueType) -> None:
        """Set the finish reason to report when the engine aborts the request, unless one is already set."""
        if self.cut_short is None:
            self.cut_short = self.sink.abort_reason = reason

    def wake(self) -> None:
        """Wake the task that waits for the request to be in the engine, or will."""
        self._waking = True
        if self._added is not None and not self._added.done():
            self._added.set_result(None)

    async def added(self) -> None:
        """Wait until the request is in the engine, or has ended without being added."""
        if not self.sink.internal_id and not self._waking:
            if self._added is None:
                self._added = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._added)
