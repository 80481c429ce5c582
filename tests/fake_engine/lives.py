"""A server without its transport, and callers that do to their requests whatever a test tells them to.

Each request has a serial number: the length of its prompt, which its last message reports as usage, and the token that the
engine generates for it. So whatever a caller receives shows which request it belongs to.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NamedTuple, cast

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest

from fake_engine.core import FakeEngineCore, FakeRequest
from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import FINISH_REASON_TIME_LIMIT, GenerationInput
from tokenwire.v1.multiplex_pb2 import MultiplexAbort, MultiplexSubmit
from tokenwire.v1.sampling_params_pb2 import SamplingParams
from tokenwire_server.access.caller import Caller
from tokenwire_server.config import ServerConfig
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError, engine_dead
from tokenwire_server.requests.live_request import LiveRequest
from tokenwire_server.requests.registry import Registry
from tokenwire_server.services.engine import EngineServicer
from tokenwire_server.services.host import Host
from tokenwire_server.services.multiplex.stream import MultiplexStream

BROKEN = 0
"""A token with which an output cannot be converted; serial numbers begin above it."""
_CALLER = Caller("", "ipv4:127.0.0.1")
_TURNS = 40
"""Turns of the event loop in which everything that is under way happens."""


class CallEndedError(Exception):
    """Ends a call in place of gRPC's AbortError."""


class Context:
    """A call whose caller reads at once."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.failed = False

    def invocation_metadata(self) -> None:
        return None

    def peer_identities(self) -> None:
        return None

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, message: Any) -> None:
        self.messages.append(message)

    async def abort_with_status(self, _status: Any) -> None:
        self.failed = True
        raise CallEndedError


class Call(NamedTuple):
    """A call with one request."""

    serial: int
    context: Context
    task: "asyncio.Task[None]"


class Stream(NamedTuple):
    """A Multiplex stream."""

    serials: set[int]
    submits: Counter[int]
    """Number of submits by handle."""
    actions: "asyncio.Queue[pb.MultiplexRequest]"
    context: Context
    task: "asyncio.Task[None]"


class Lives:
    """The server, its engine and its callers."""

    def __init__(self, core: FakeEngineCore, engine: Engine) -> None:
        self.core = core
        self.registry = Registry(engine)
        self._engine = engine
        self._host = Host(ServerConfig())
        self._host.state.serve(engine, self.registry)
        self._servicer = EngineServicer(self._host)
        self._count = 0
        self.calls: list[Call] = []
        self.streams: list[Stream] = []
        self.left: set[int] = set()
        """Requests whose callers have left before they were told of an end."""
        self.limited: set[int] = set()
        """Requests whose time limit has expired before anybody aborted them."""
        self.dead = False
        self.settled: list[tuple[str, int, int]] = []
        """Ids, serial numbers and outcomes, in the order in which the registry decided them."""
        self.arrived: set[int] = set()
        """Requests that the engine has not refused."""
        add = core.add_request_async

        async def adding(request: EngineCoreRequest) -> None:
            if core.refusal is None:
                self.arrived.add(len(request.prompt_token_ids))
            await add(request)

        core.add_request_async = adding  # type: ignore[method-assign]
        settle = self.registry._settle

        def recording(live: LiveRequest, outcome: Any) -> None:
            if self.registry.find(_CALLER, live.request.request_id) is live:
                self.settled.append((live.request.request_id, len(live.request.prompt_token_ids), outcome))
            settle(live, outcome)

        self.registry._settle = recording  # type: ignore[method-assign]
        self._open_stream()

    # What callers do

    def generate(self, request_id: str, n: int, stream: bool) -> None:  # from a tuple
        message, context = self._input(request_id, n), Context()

        async def call() -> None:
            if stream:
                request = pb.GenerateStreamRequest(input=message)
                await cast("Awaitable[None]", self._servicer.GenerateStream(request, cast("Any", context)))
            else:
                request = pb.GenerateRequest(input=message)  # type: ignore[assignment]
                await context.write(await self._servicer.Generate(cast("Any", request), cast("Any", context)))

        self.calls.append(Call(len(message.prompt_token_ids), context, _run(call)))

    def _open_stream(self) -> None:
        context, actions = Context(), asyncio.Queue[pb.MultiplexRequest]()

        async def sent() -> AsyncIterator[pb.MultiplexRequest]:
            while True:
                yield await actions.get()

        async def call() -> None:
            await cast("Awaitable[None]", self._servicer.Multiplex(sent(), cast("Any", context)))

        self.streams.append(Stream(set(), Counter(), actions, context, _run(call)))

    def submit(self, handle: int, request_id: str, n: int) -> None:
        stream = self.streams[-1]
        # A caller may use a handle again once it has read its end.
        if stream.submits[handle] > _ends(stream.context, handle):
            return
        stream.submits[handle] += 1
        message = self._input(request_id, n)
        stream.serials.add(len(message.prompt_token_ids))
        stream.actions.put_nowait(pb.MultiplexRequest(submit=MultiplexSubmit(handle=handle, input=message)))

    def abort_handles(self, handles: list[int]) -> None:
        self.streams[-1].actions.put_nowait(pb.MultiplexRequest(abort=MultiplexAbort(handles=handles)))

    async def abort(self, request_ids: list[str], remember: float | None) -> dict[str, int]:
        outcomes = await self.registry.abort(_CALLER, request_ids, remember)
        return dict(zip(request_ids, outcomes, strict=True))

    def leave_call(self, which: int) -> None:
        if self.calls:
            call = self.calls[which % len(self.calls)]
            self.left.add(call.serial)
            call.task.cancel()

    def leave_stream(self) -> None:
        self.left |= self.streams[-1].serials
        self.streams[-1].task.cancel()
        self._open_stream()

    def give_up(self, which: int) -> None:
        """Let a caller count as one that does not read."""
        readers = sorted(self._host.slow_readers._readers, key=id)
        if readers:
            reader = readers[which % len(readers)]
            self._host.slow_readers._readers.discard(reader)
            reader.give_up(RequestError(Reason.SLOW_READER, "too slow"))
            if isinstance(reader, MultiplexStream):
                self.leave_stream()
            else:
                self.left |= {call.serial for call in self.calls}

    def _input(self, request_id: str, n: int) -> GenerationInput:
        self._count += 1
        params = SamplingParams(n=n, temperature=1.0)
        return GenerationInput(
            request_id=request_id, prompt_token_ids=[self._count] * self._count, sampling_params=params
        )

    # What the engine does

    def step(self, which: int, tokens: int, finish: str | None) -> None:
        if request := self._running(which):
            request.step(*[len(request.request.prompt_token_ids)] * tokens, finish=finish)

    def break_output(self, which: int, finish: str | None) -> None:
        """Produce an output that cannot be delivered, and the next one before anybody can act on that."""
        if request := self._running(which):
            request.step(BROKEN, finish=finish)
            request.step(len(request.request.prompt_token_ids))

    def refuse(self, refused: bool) -> None:  # from a tuple
        """Refuse new requests in the engine's own checks, or no longer."""
        self.core.refusal = VLLMValidationError("not now") if refused else None

    def _running(self, which: int) -> FakeRequest | None:
        live = list(self.core.live.values())
        return live[which % len(live)] if live and not self.dead else None

    def max_time(self, which: int) -> None:
        live = list(self.registry._live.values())
        if live:
            limited = live[which % len(live)]
            self.registry._on_max_time(limited)
            if limited.cut_short == FINISH_REASON_TIME_LIMIT:
                self.limited.add(len(limited.request.prompt_token_ids))

    def hold(self, held: bool) -> None:  # from a tuple
        """Let requests wait on their way into the engine, or no longer."""
        if held:
            self.core.admission.clear()
        else:
            self.core.admission.set()

    def die(self) -> None:
        self.dead = True
        self.core.die()
        self.registry.fail_all(engine_dead())

    # Time

    async def turns(self, count: int = _TURNS) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Let all callers leave."""
        for call in self.calls:
            if not call.task.done():
                self.left.add(call.serial)
                call.task.cancel()
        self.left |= self.streams[-1].serials
        self.streams[-1].task.cancel()
        await self.turns()


def _run(call: Callable[[], Awaitable[None]]) -> "asyncio.Task[None]":
    async def run() -> None:
        with contextlib.suppress(CallEndedError):
            await call()

    return asyncio.create_task(run())


def _ends(context: Context, handle: int) -> int:
    ends = 0
    for message in context.messages:
        step = message.step
        ends += sum(finish.handle == handle for finish in step.finished if finish.last)
        ends += sum(event.handle == handle for event in step.failed)
        # An abort of an unknown handle is rejected too, which ends nothing.
        ends += sum(event.handle == handle for event in step.rejected if event.status.reason != Reason.UNKNOWN_HANDLE)
    return ends


class Told(NamedTuple):
    """What callers received of one request."""

    serial: int
    reasons: list[int]
    """Finish reasons, in order."""


def told_to_call(call: Call) -> Told:
    """Return what a call received, having checked that it is its own, and that nothing follows an end."""
    outputs = [output for message in call.context.messages for output in message.outputs]
    assert {token for output in outputs for token in output.token_ids} <= {call.serial}
    for index in {output.index for output in outputs}:
        assert not any(output.finish_reason for output in [o for o in outputs if o.index == index][:-1])
    usages = [message.usage.prompt_tokens for message in call.context.messages if message.HasField("usage")]
    assert usages in ([], [call.serial])
    assert not (usages and call.context.failed)
    return Told(call.serial, [output.finish_reason for output in outputs if output.finish_reason])


def told_to_stream(stream: Stream) -> Iterable[Told]:
    """Return what a stream received of each request that ended, having checked that a handle's tokens are its own."""
    serials: dict[int, set[int]] = {}
    reasons: dict[int, list[int]] = {}
    for message in stream.context.messages:
        step = message.step
        for event in step.accepted:
            assert event.handle not in reasons, "a handle that is in use was accepted again"
            reasons[event.handle] = []
            serials[event.handle] = set()
        counts = step.token_counts or [1] * len(step.handles)
        start = 0
        for handle, count in zip(step.handles, counts, strict=True):
            assert handle in reasons, "tokens of a handle without a request"
            serials[handle] |= set(step.token_ids[start : start + count])
            start += count
        for finish in step.finished:
            reasons[finish.handle].append(finish.finish_reason)
            if finish.last:
                assert serials.pop(finish.handle) <= {finish.usage.prompt_tokens}, "another request's tokens"
                yield Told(finish.usage.prompt_tokens, reasons.pop(finish.handle))
        for event in step.failed:
            # A request that fails on its way into the engine was not accepted yet.
            assert len(serials.pop(event.handle, set())) <= 1, "tokens of several requests"
            reasons.pop(event.handle, None)
    assert all(len(found) <= 1 for found in serials.values()), "tokens of several requests"
