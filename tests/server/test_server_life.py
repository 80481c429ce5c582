"""The server's state and its end, in this process and on the fake engine."""

import asyncio
from itertools import product
from typing import Any

import grpc
import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineCore, failure_of, make_llm, read, within
from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.generation_pb2 import FINISH_REASON_ABORT, GenerationInput
from tokenwire_server.config import ExitCode, ServerConfig
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError
from tokenwire_server.process import liveness, orphans, server
from tokenwire_server.process.server import Server
from tokenwire_server.requests.server_state import ServerState, State
from tokenwire_server.requests.slow_readers import SlowReaders
from tokenwire_server.transport.server import Transport


@pytest.fixture
async def core(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeEngineCore, Engine]:
    for name in ("adopt", "release", "end_descendants"):
        # These tests' process has children of others.
        monkeypatch.setattr(orphans, name, lambda **_: None)
    fake = FakeEngineCore()
    return fake, Engine(await make_llm(vllm_config, fake))


async def ready(running: Server) -> None:
    async with asyncio.timeout(10):
        while running._host.state.current is not State.SERVING:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("task", ["slow readers", "statistics", "access files"])
async def test_a_background_task_that_fails_ends_the_server_with_its_reason(
    core: tuple[FakeEngineCore, Engine],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    task: str,
) -> None:
    """Requests in flight end with their tokens so far, never with a connection that breaks."""
    fake, engine = core
    fails = asyncio.Event()

    async def failing(*_: Any) -> None:
        await fails.wait()
        raise ZeroDivisionError("a bug")

    match task:
        case "slow readers":
            monkeypatch.setattr(SlowReaders, "run", failing)
        case "statistics":
            monkeypatch.setattr(server, "_log_stats", failing)
        case _:
            monkeypatch.setattr(Transport, "watch_files", failing)
    running = Server(ServerConfig(port=0), "model", lambda: engine)
    ended = asyncio.create_task(running.run())
    await ready(running)
    async with grpc.aio.insecure_channel(running._transport.address) as channel:
        request = pb.GenerateStreamRequest(input=GenerationInput(prompt_token_ids=[1]))
        call = EngineServiceStub(channel).GenerateStream(request)
        (await fake.next_request()).step(5)
        await read(call)
        fails.set()
        assert (await read(call)).outputs[0].finish_reason == FINISH_REASON_ABORT
        assert await within(ended) == ExitCode.INTERNAL
    assert fake.was_shut_down
    [line] = capfd.readouterr().err.splitlines()
    assert line == "tokenwire: error: a background task failed: ZeroDivisionError('a bug')"


async def test_a_background_task_that_fails_while_the_engine_is_loaded(
    core: tuple[FakeEngineCore, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, engine = core
    fake.readiness.clear()

    async def failing(_: Any) -> None:
        await fake.was_asked.wait()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Transport, "watch_files", failing)
    assert await within(Server(ServerConfig(port=0), "model", lambda: engine).run()) == ExitCode.INTERNAL
    assert fake.was_shut_down


async def test_health_knows_of_the_engines_death_no_later_than_the_first_caller(
    core: tuple[FakeEngineCore, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS C1."""
    fake, engine = core
    # Without the failure itself it would be noticed by the next look only, after the test's limit.
    monkeypatch.setattr(liveness, "_INTERVAL", 1000.0)
    running = Server(ServerConfig(port=0, stay_after_engine_death=True), "model", lambda: engine)
    ended = asyncio.create_task(running.run())
    await ready(running)
    async with grpc.aio.insecure_channel(running._transport.address) as channel:
        request = pb.GenerateStreamRequest(input=GenerationInput(prompt_token_ids=[1]))
        call = EngineServiceStub(channel).GenerateStream(request)
        await fake.next_request()
        # The watch begins to wait for the engine's failure at its next look.
        running_watch = asyncio.create_task(liveness.wait_for_death(engine, 0))
        await asyncio.sleep(0)
        fake.die()
        assert (await failure_of(call.read())).reason == Reason.ENGINE_DEAD
        assert await within(running_watch) is liveness.Death.DIED
    running._on_signal()
    await within(ended)


_MOVES = {
    (State.LOADING, State.SERVING),
    (State.SERVING, State.DRAINING),
    (State.SERVING, State.DEAD),
    (State.DRAINING, State.DEAD),
}


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_the_state_moves_in_one_direction(before: State, after: State) -> None:
    state = ServerState()
    state.current = before
    if (before, after) in _MOVES:
        state.enter(after)
        assert state.current is after
    else:
        with pytest.raises(ValueError, match=f"from {before.name} to {after.name}"):
            state.enter(after)
        assert state.current is before


@pytest.mark.parametrize(
    ("current", "reason"),
    [
        (State.LOADING, Reason.ENGINE_LOADING),
        (State.DRAINING, Reason.DRAINING),
        (State.DEAD, Reason.ENGINE_DEAD),
    ],
)
async def test_what_is_refused_in_each_state(
    core: tuple[FakeEngineCore, Engine], current: State, reason: Reason
) -> None:
    _, engine = core
    state = ServerState()
    if current is not State.LOADING:
        state.serve(engine, Any)  # type: ignore[arg-type]  # the registry is not asked
        assert state.accepting() == state.ready()
        state.enter(current)
    with pytest.raises(RequestError) as refused:
        state.accepting()
    assert refused.value.reason == reason
    if current is State.DRAINING:
        # Questions are still answered.
        state.ready()
    else:
        with pytest.raises(RequestError):
            state.ready()
    await engine.close()
