"""A live request."""

import asyncio
from typing import TYPE_CHECKING

from tokenwire.v1.generation_pb2 import FinishReason
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.engine.sink import Sink

if TYPE_CHECKING:
    from tokenwire.v1.engine_service_pb2 import AbortOutcome


class LiveRequest:
    """A request from its registration to its outcome."""

    __slots__ = ("_added", "client", "cut_short", "key", "outcome", "request", "sink", "timer")

    def __init__(self, caller: Caller, request: EngineRequest, sink: Sink) -> None:
        self.client = caller.client
        self.key = (caller.principal, request.request_id)
        self.request = request
        self.sink = sink
        self.outcome: AbortOutcome.ValueType | None = None
        """The outcome that Abort reports; None while the request is live."""
        self.cut_short: FinishReason.ValueType | None = None
        """Why the request is being aborted, ABORT or TIME_LIMIT: the first reason counts. None while it runs."""
        self.timer: asyncio.TimerHandle | None = None
        """Aborts the request when its `max_time` has expired."""
        self._added: asyncio.Future[None] | None = None

    @property
    def engine_id(self) -> str:
        """The request's id for vLLM, unique among live requests: ids and principals hold no spaces."""
        principal, request_id = self.key
        return f"{principal} {request_id}" if principal else request_id

    def cut(self, reason: FinishReason.ValueType) -> None:
        """Set the finish reason that an abort of the request will be reported with, unless one is set."""
        if self.cut_short is None:
            self.cut_short = self.sink.abort_reason = reason

    def wake(self) -> None:
        """Wake whoever waits for the request to be in the engine."""
        if self._added is not None and not self._added.done():
            self._added.set_result(None)

    async def added(self) -> None:
        """Wait until the request is in the engine, or is over before that."""
        if not self.sink.internal_id and self.outcome is None:
            if self._added is None:
                self._added = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._added)
