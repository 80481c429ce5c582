"""The load of an engine that does not get to its end."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineCore, make_llm, within
from tokenwire._contract import Reason
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError
from tokenwire_server.process import loading, orphans
from tokenwire_server.process.loading import Loading


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """With what force processes have been ended: these tests' process has others' children."""
    forces: list[bool] = []
    monkeypatch.setattr(orphans, "end_descendants", lambda *, force, **_: forces.append(force))
    return forces


@pytest.fixture
def core() -> FakeEngineCore:
    return FakeEngineCore()


@pytest.fixture
async def engine(vllm_config: VllmConfig, core: FakeEngineCore) -> AsyncIterator[Engine]:
    engine = Engine(await make_llm(vllm_config, core))
    yield engine
    await engine.close()


async def test_an_engine_that_dies_before_it_is_ready_ends_the_load(core: FakeEngineCore, engine: Engine) -> None:
    """vLLM itself would wait for ever for its answer."""
    core.readiness.clear()
    load = asyncio.create_task(Loading(lambda: engine).engine())
    await within(core.was_asked.wait())
    core.die()
    with pytest.raises(RequestError) as failed:
        await within(load)
    assert failed.value.reason == Reason.ENGINE_DEAD
    assert core.was_shut_down


async def test_stopping_a_load_that_has_failed_can_be_cancelled(ended: list[bool]) -> None:
    """FAULTS C6."""

    def fail() -> Engine:
        raise RuntimeError("no such weights")

    load = Loading(fail)
    with pytest.raises(RuntimeError):
        await within(load.engine())
    await within(load.end())
    assert ended == []


async def test_the_end_of_a_load_can_be_cancelled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS C6."""
    load = Loading(lambda: engine)
    await within(load.engine())
    stopping, stops = threading.Event(), threading.Event()

    def shutdown() -> None:
        stopping.set()
        stops.wait(10)

    monkeypatch.setattr(engine, "shutdown", shutdown)
    end = asyncio.create_task(load.end())
    await asyncio.to_thread(stopping.wait, 10)
    end.cancel()
    await asyncio.wait({end}, timeout=10)
    assert end.cancelled()
    stops.set()


async def test_a_load_is_left_before_the_engine_is_ready(core: FakeEngineCore, engine: Engine) -> None:
    core.readiness.clear()
    load = asyncio.create_task(Loading(lambda: engine).engine())
    await within(core.was_asked.wait())
    load.cancel()
    await asyncio.wait({load}, timeout=10)
    assert load.cancelled()
    assert core.was_shut_down


async def test_what_raises_in_the_load_is_told() -> None:
    def build() -> Engine:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await within(Loading(build).engine())


async def test_an_engine_that_is_built_while_the_load_is_ended_is_shut_down(
    core: FakeEngineCore, engine: Engine, ended: list[bool]
) -> None:
    go_on = threading.Event()

    def build() -> Engine:
        go_on.wait()
        return engine

    end = asyncio.create_task(Loading(build).end())
    while not ended:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0.01)
    go_on.set()
    await within(end)
    assert core.was_shut_down
    assert not loading.is_running()


async def test_a_load_that_does_not_end_is_ended_by_force_and_then_left(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_GRACE", 0.5)
    monkeypatch.setattr(loading, "_LIMIT", 1.0)
    go_on = threading.Event()

    def build() -> Engine:
        go_on.wait()
        raise ValueError

    await within(Loading(build).end())
    assert ended[0] is False
    assert ended[-1] is True
    assert loading.is_running()
    go_on.set()
    while loading.is_running():  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0.01)


def test_the_children_of_the_script_that_started_the_server_are_spared() -> None:
    """`exporter & exec tokenwire serve MODEL` makes the exporter a child of the server."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as exporter:
        assert exporter.stdout is not None
        exporter.stdout.readline()
        others = orphans.children()
        with subprocess.Popen(command) as worker:
            orphans.end_descendants(force=True, spare=others)
            assert worker.wait(10) == -signal.SIGKILL
        assert exporter.poll() is None
        exporter.kill()
