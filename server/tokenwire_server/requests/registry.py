"""Which requests are live, and what became of those that were.

The registry decides each request's outcome once, and Abort reports exactly that: ABORTED if and only if the call itself
was told ABORT.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenwire._contract import Reason
from tokenwire.v1.engine_service_pb2 import (
    ABORT_OUTCOME_ABORTED,
    ABORT_OUTCOME_ALREADY_FINISHED,
    ABORT_OUTCOME_NOT_FOUND,
    ABORT_OUTCOME_REMEMBERED,
    AbortOutcome,
)
from tokenwire.v1.generation_pb2 import FINISH_REASON_ABORT, FINISH_REASON_TIME_LIMIT, FinishReason, SequenceOutput
from tokenwire.v1.multiplex_pb2 import MultiplexFinish
from tokenwire_server.access.caller import Caller
from tokenwire_server.engine.engine import Engine
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError, Violation
from tokenwire_server.requests.fair_cache import Key, Recent

_KEPT_OUTCOMES = 16_384
"""Most finished requests whose outcome is kept for late aborts: 4 MB or so."""
_KEPT_REMEMBERED = 100_000
"""Most ids remembered for a later arrival: ten full Abort calls."""


class LiveRequest:
    """A request from its admission to its outcome."""

    __slots__ = ("_added", "client", "cut_short", "key", "outcome", "request_id", "sink", "timer")

    def __init__(self, caller: Caller, request_id: str, sink: Sink) -> None:
        self.client = caller.client
        self.key = (caller.principal, request_id)
        self.request_id = request_id
        self.sink = sink
        self.outcome: AbortOutcome.ValueType | None = None
        """What an abort is told; None while the request is live."""
        self.cut_short: FinishReason.ValueType | None = None
        """What the request's last message says in place of the engine's "abort": the first to ask decides."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the request when its `max_time` is over."""
        self._added: asyncio.Future[None] | None = None

    @property
    def engine_id(self) -> str:
        """The id that the engine is told, which no other live request has; ids hold no spaces."""
        principal, request_id = self.key
        return f"{principal} {request_id}" if principal else request_id

    def wake(self) -> None:
        """Let go of those who wait for the request to be in the engine."""
        if self._added is not None and not self._added.done():
            self._added.set_result(None)

    async def added(self) -> None:
        """Wait until the request is in the engine or has ended before that."""
        if not self.sink.internal_id and self.outcome is None:
            if self._added is None:
                self._added = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._added)


class Registry:
    """The live requests by principal and id: what one principal does to its ids, no other one notices."""

    def __init__(self, engine: Engine, max_per_client: int | None = None) -> None:
        """Make a registry.

        Args:
            engine: the engine.
            max_per_client: most live requests of a client; None means no limit.

        """
        self._engine = engine
        self._max_per_client = max_per_client
        self._live: dict[Key, LiveRequest] = {}
        self._per_client: Counter[str] = Counter()
        self._outcomes: Recent[AbortOutcome.ValueType] = Recent(_KEPT_OUTCOMES)
        self._remembered: Recent[float] = Recent(_KEPT_REMEMBERED)
        self._idle: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    def open(self, caller: Caller, request_id: str, sink: Sink, path: str = "input.request_id") -> LiveRequest:
        """Take a request in; an empty id is replaced by one that is made up.

        A request whose id an abort has asked to remember comes back with its outcome already set: ABORTED.

        Raises:
            RequestError: a live request has that id, DUPLICATE_REQUEST_ID, or the client has too many, QUEUE_FULL.

        """
        live = LiveRequest(caller, request_id or uuid.uuid4().hex, sink)
        if live.key in self._live:
            raise RequestError(
                Reason.DUPLICATE_REQUEST_ID,
                f"{path}: a live request has the id {request_id!r}",
                (Violation(path, "must differ from the ids of all live requests"),),
            )
        if self._max_per_client is not None and self._per_client[caller.client] >= self._max_per_client:
            raise RequestError(
                Reason.QUEUE_FULL, f"{caller.client} has its most live requests, {self._max_per_client}; end one first"
            )
        expiry = self._remembered.pop(live.key)
        self._live[live.key] = live
        self._per_client[live.client] += 1
        if expiry is not None and expiry > time.monotonic():
            self._settle(live, ABORT_OUTCOME_ABORTED)
        return live

    def find(self, caller: Caller, request_id: str) -> LiveRequest | None:
        """Return the caller's live request of an id; None where there is none."""
        return self._live.get((caller.principal, request_id))

    def finish(self, live: LiveRequest, ends: Iterable[SequenceOutput | MultiplexFinish]) -> None:
        """Record that a request has ended by itself or by an abort, before its caller is told.

        Args:
            live: the request.
            ends: the last message's sequences; an ABORT among their finish reasons becomes what cut the request short.

        """
        aborted = False
        for end in ends:
            if end.finish_reason == FINISH_REASON_ABORT and live.cut_short is not None:
                end.finish_reason = live.cut_short
            aborted = aborted or end.finish_reason == FINISH_REASON_ABORT
        self._settle(live, ABORT_OUTCOME_ABORTED if aborted else ABORT_OUTCOME_ALREADY_FINISHED)

    def drop(self, *requests: LiveRequest) -> None:
        """Let go of requests whose call is over, in one engine call. Safe to repeat, and never waits."""
        running = [live for live in requests if live.outcome is None]
        for live in running:
            self._settle(live, ABORT_OUTCOME_ALREADY_FINISHED)
        if ids := [live.sink.internal_id for live in running if live.sink.internal_id and live.sink.aborted is None]:
            self._engine.abort_soon(ids)

    def added(self, live: LiveRequest) -> None:
        """Record that a request is in the engine now."""
        live.wake()
        if live.outcome is not None or live.cut_short == FINISH_REASON_TIME_LIMIT:
            self._engine.abort_soon([live.sink.internal_id])

    def limit_time(self, live: LiveRequest, seconds: float) -> None:
        """End a request after some seconds: its last message will say TIME_LIMIT."""
        live.timer = asyncio.get_running_loop().call_later(seconds, self._cut_short, live)

    def _cut_short(self, live: LiveRequest) -> None:
        if live.cut_short is None and live.outcome is None:
            live.cut_short = FINISH_REASON_TIME_LIMIT
            if live.sink.internal_id:
                self._engine.abort_soon([live.sink.internal_id])

    async def abort(
        self, caller: Caller, request_ids: Sequence[str], remember_seconds: float | None
    ) -> list[AbortOutcome.ValueType]:
        """Abort the caller's requests and return the outcome of each id, in order, once the engine has acted.

        Args:
            caller: whose requests they are; another's are not known to it.
            request_ids: the ids; one may be given more than once.
            remember_seconds: how long to remember ids that are not known; None means not at all.

        """
        found: dict[str, LiveRequest] = {}
        outcomes: dict[str, AbortOutcome.ValueType] = {}
        # Before it waits for the engine: a request that comes meanwhile is one that this abort has overtaken.
        for request_id in dict.fromkeys(request_ids):
            if (live := self.find(caller, request_id)) is not None:
                found[request_id] = live
            else:
                outcomes[request_id] = self._past((caller.principal, request_id), remember_seconds)
        await self._abort(list(found.values()))
        for request_id, live in found.items():
            assert live.outcome is not None, "an abort settles what it finds"
            outcomes[request_id] = live.outcome
        return [outcomes[request_id] for request_id in request_ids]

    def abort_soon(self, requests: Sequence[LiveRequest]) -> None:
        """Abort requests in one engine call, without waiting: each ends with ABORT."""
        for live in requests:
            if live.cut_short is None:
                live.cut_short = FINISH_REASON_ABORT
        if requests:
            self._engine.abort_soon([live.sink.internal_id for live in requests])

    async def abort_all(self) -> int:
        """Abort all live requests and return how many there were."""
        live = list(self._live.values())
        await self._abort(live)
        return len(live)

    def fail_all(self, error: RequestError) -> None:
        """Fail all live requests, whose engine is gone."""
        for live in list(self._live.values()):
            live.sink.fail(error)
            self._settle(live, ABORT_OUTCOME_ALREADY_FINISHED)

    async def idle(self) -> None:
        """Wait until no request is live."""
        if self._live:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    async def _abort(self, requests: list[LiveRequest]) -> None:
        if not requests:
            return
        for live in requests:
            if live.cut_short is None:
                live.cut_short = FINISH_REASON_ABORT
            await live.added()
        if ids := [live.sink.internal_id for live in requests if live.outcome is None and live.sink.internal_id]:
            await self._engine.abort(ids)
        for live in requests:
            # The call itself has not read its last output yet; what it will read is settled all the same.
            aborted = live.sink.aborted and live.cut_short == FINISH_REASON_ABORT
            self._settle(live, ABORT_OUTCOME_ABORTED if aborted else ABORT_OUTCOME_ALREADY_FINISHED)

    def _settle(self, live: LiveRequest, outcome: AbortOutcome.ValueType) -> None:
        if live.outcome is not None:
            return
        live.outcome = outcome
        live.wake()
        if live.timer is not None:
            live.timer.cancel()
        if self._live.get(live.key) is live:
            del self._live[live.key]
            self._per_client[live.client] -= 1
            if not self._per_client[live.client]:
                del self._per_client[live.client]
            if not self._live and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
        self._outcomes.put(live.key, outcome)

    def _past(self, key: Key, remember_seconds: float | None) -> AbortOutcome.ValueType:
        if (outcome := self._outcomes.get(key)) is not None:
            return outcome
        if remember_seconds is None:
            return ABORT_OUTCOME_NOT_FOUND
        self._remembered.put(key, time.monotonic() + remember_seconds)
        return ABORT_OUTCOME_REMEMBERED
