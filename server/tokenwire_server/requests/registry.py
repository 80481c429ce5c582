"""The requests in flight, and the outcomes of requests that have ended.

The registry decides each request's outcome once, and Abort reports exactly that outcome: ABORTED if and only if the
call itself ended with ABORT. Unregistering a request aborts it in the engine unless the engine has ended it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeVar

from tokenwire._contract import Reason
from tokenwire.v1.engine_service_pb2 import (
    ABORT_OUTCOME_ABORTED,
    ABORT_OUTCOME_ALREADY_FINISHED,
    ABORT_OUTCOME_NOT_FOUND,
    ABORT_OUTCOME_REMEMBERED,
    AbortOutcome,
)
from tokenwire.v1.generation_pb2 import FINISH_REASON_ABORT, FINISH_REASON_TIME_LIMIT
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion.fields import quoted
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.engine.engine import Engine
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError, Violation
from tokenwire_server.requests.fair_cache import FairCache, Key
from tokenwire_server.requests.live_request import LiveRequest

_T = TypeVar("_T")

_PER_TURN = 500
"""Number of ids of an abort after which the task yields to the event loop: about a millisecond."""
_KEPT_OUTCOMES = 16_384
"""Maximum number of ended requests whose outcomes are kept for late aborts: about 4 MB."""
_KEPT_REMEMBERED = 100_000
"""Maximum number of ids remembered for requests that arrive later: ten Abort calls of maximum size."""


class Registry:
    """The live requests by principal and id; each principal has its own namespace of ids."""

    def __init__(self, engine: Engine, max_per_client: int | None = None) -> None:
        """Make a registry.

        Args:
            engine: the engine.
            max_per_client: maximum number of requests in flight of one client; None means no limit.

        """
        self._engine = engine
        self._max_per_client = max_per_client
        self._live: dict[Key, LiveRequest] = {}
        self._per_client: Counter[str] = Counter()
        self._outcomes: FairCache[AbortOutcome.ValueType] = FairCache(_KEPT_OUTCOMES)
        self._remembered: FairCache[float] = FairCache(_KEPT_REMEMBERED)
        self._idle: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    # Registration and completion

    def check(self, caller: Caller, request_id: str, path: str = "input.request_id") -> None:
        """Check that a request could be registered now.

        Args:
            caller: the caller of the RPC.
            request_id: the request's id; "" for a server-generated id.
            path: path of the id in the request message, for errors.

        Raises:
            RequestError: DUPLICATE_REQUEST_ID if a request with that id is in flight, QUEUE_FULL if the client has
                reached its limit.

        """
        if (caller.principal, request_id) in self._live:
            raise RequestError(
                Reason.DUPLICATE_REQUEST_ID,
                f"{path}: a request with id {quoted(request_id)} is in flight",
                (Violation(path, "must differ from the ids of all requests in flight"),),
            )
        if self._max_per_client is not None and self._per_client[caller.client] >= self._max_per_client:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"{caller.client} has reached its maximum number of requests in flight, {self._max_per_client}; "
                "wait for one to finish",
            )

    def register(
        self, caller: Caller, request: EngineRequest, sink: Sink, path: str = "input.request_id"
    ) -> LiveRequest:
        """Register a request.

        Args:
            caller: the caller of the RPC.
            request: the request.
            sink: receives the request's outputs.
            path: path of the id in the request message, for errors.

        Returns:
            The live request. If an earlier Abort asked to remember its id, its outcome is already ABORTED, and it must
            not be added to the engine.

        Raises:
            RequestError: as `check`.

        """
        self.check(caller, request.request_id, path)
        live = LiveRequest(caller, request, sink)
        expiry = self._remembered.pop(live.key)
        self._live[live.key] = live
        self._per_client[live.client] += 1
        if expiry is not None and expiry > time.monotonic():
            self._settle(live, ABORT_OUTCOME_ABORTED)
        elif request.max_time is not None:
            live.timer = asyncio.get_running_loop().call_later(request.max_time, self._on_max_time, live)
        return live

    def added(self, live: LiveRequest) -> None:
        """Record that the engine has a request, and abort it if an abort was requested meanwhile."""
        live.wake()
        if live.cut_short is not None:
            self._engine.abort_soon([live.sink.internal_id])

    def find(self, caller: Caller, request_id: str) -> LiveRequest | None:
        """Return the caller's live request with this id; None if there is none."""
        return self._live.get((caller.principal, request_id))

    def finish(self, live: LiveRequest) -> None:
        """Record the outcome of a request whose sink has received its end; call it before the caller is notified."""
        self._settle(live, _outcome(live))

    def unregister(self, *requests: LiveRequest) -> None:
        """Unregister requests and abort them in the engine unless it has ended them. Safe to repeat; never waits."""
        for live in requests:
            self._settle(live, ABORT_OUTCOME_ALREADY_FINISHED)
        self._engine.abort_unless_ended(*(live.sink for live in requests))

    def withdraw(self, live: LiveRequest) -> None:
        """Unregister a request that the engine has refused, without recording an outcome for its id."""
        self._remove(live)
        live.wake()

    def fail_all(self, error: RequestError) -> None:
        """Fail all live requests after the engine has died."""
        for live in list(self._live.values()):
            live.sink.ended = True
            live.sink.fail(error)
            self._settle(live, ABORT_OUTCOME_ALREADY_FINISHED)

    async def idle(self) -> None:
        """Wait until no requests are in flight."""
        if self._live:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    # Aborts

    async def abort(
        self, caller: Caller, request_ids: Sequence[str], remember_seconds: float | None
    ) -> list[AbortOutcome.ValueType]:
        """Abort the caller's requests and wait until the engine has acted.

        Args:
            caller: the caller of the RPC; requests of other principals are not found.
            request_ids: the ids; duplicates are allowed.
            remember_seconds: how long to remember the ids of requests not in flight; None means not at all.

        Returns:
            The outcome for each id, in order.

        """
        found: dict[str, LiveRequest] = {}
        outcomes: dict[str, AbortOutcome.ValueType] = {}
        # Before waiting for the engine: this abort may have overtaken a request that arrives meanwhile.
        try:
            async for request_id in _in_turns(dict.fromkeys(request_ids)):
                if (live := self.find(caller, request_id)) is not None:
                    found[request_id] = live
                else:
                    outcomes[request_id] = self._past((caller.principal, request_id), remember_seconds)
        except asyncio.CancelledError:
            self.abort_soon(list(found.values()))
            raise
        await self._abort(list(found.values()))
        for request_id, live in found.items():
            outcome = live.outcome
            # None: the engine refused the request meanwhile, so it has no outcome.
            outcomes[request_id] = self._past(live.key, remember_seconds) if outcome is None else outcome
        return [outcomes[request_id] for request_id in request_ids]

    def abort_soon(self, requests: Sequence[LiveRequest]) -> None:
        """Abort requests in one engine call, without waiting; each ends with ABORT."""
        for live in requests:
            live.cut(FINISH_REASON_ABORT)
        # A request that is not in the engine yet is aborted once it has been added.
        self._engine.abort_soon([live.sink.internal_id for live in requests if live.sink.internal_id])

    async def abort_all(self) -> int:
        """Abort all live requests and return their number."""
        live = list(self._live.values())
        await self._abort(live)
        return len(live)

    def _on_max_time(self, live: LiveRequest) -> None:
        if live.cut_short is None and live.outcome is None:
            live.cut(FINISH_REASON_TIME_LIMIT)
            if live.sink.internal_id:
                self._engine.abort_soon([live.sink.internal_id])

    async def _abort(self, requests: list[LiveRequest]) -> None:
        if not requests:
            return
        for live in requests:
            live.cut(FINISH_REASON_ABORT)
        if coming := [live for live in requests if not live.sink.internal_id]:
            # The others do not wait for these, nor for a caller of Abort that leaves meanwhile.
            self.abort_soon([live for live in requests if live.sink.internal_id])
            for live in coming:
                await live.added()
        if ids := [live.sink.internal_id for live in requests if live.outcome is None and live.sink.internal_id]:
            await self._engine.abort(ids)
        async for live in _in_turns(requests):
            # The call may not have read the last output yet, but the sink has received it.
            self._settle(live, _outcome(live))

    # Bookkeeping

    def _settle(self, live: LiveRequest, outcome: AbortOutcome.ValueType) -> None:
        """Unregister a request and record its outcome, if it is still registered."""
        if self._remove(live):
            live.outcome = outcome
            self._outcomes.put(live.key, outcome)
            live.wake()

    def _remove(self, live: LiveRequest) -> bool:
        if self._live.get(live.key) is not live:
            return False
        del self._live[live.key]
        if live.timer is not None:
            live.timer.cancel()
        self._per_client[live.client] -= 1
        if not self._per_client[live.client]:
            del self._per_client[live.client]
        if not self._live and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        return True

    def _past(self, key: Key, remember_seconds: float | None) -> AbortOutcome.ValueType:
        """Return the outcome for an id that is not in flight, and remember the id if requested."""
        outcome = self._outcomes.get(key)
        # A finished request's id may be about to be reused by the request that this abort is for; an aborted request
        # is the one that it is for.
        if remember_seconds is not None and outcome != ABORT_OUTCOME_ABORTED:
            self._remembered.put(key, time.monotonic() + remember_seconds)
        if outcome is not None:
            return outcome
        return ABORT_OUTCOME_NOT_FOUND if remember_seconds is None else ABORT_OUTCOME_REMEMBERED


async def _in_turns(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield the items, with a turn for the event loop's other tasks in between."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _PER_TURN == 0:
            await asyncio.sleep(0)


def _outcome(live: LiveRequest) -> AbortOutcome.ValueType:
    return ABORT_OUTCOME_ABORTED if live.sink.aborted else ABORT_OUTCOME_ALREADY_FINISHED
