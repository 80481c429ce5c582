"""The barrier waits until the engine has passed every abort sent before, with few calls, and never for ever."""

import asyncio
import logging

import pytest

from fake_engine import within
from tokenwire_server.engine.barrier import AbortBarrier


class Probe:
    """A utility call that a test lets return."""

    def __init__(self) -> None:
        self.started = 0
        self.errors: list[Exception] = []
        self._release = asyncio.Semaphore(0)
        self._start = asyncio.Event()

    async def __call__(self) -> None:
        self.started += 1
        self._start.set()
        await self._release.acquire()
        if self.errors:
            raise self.errors.pop()

    async def wait_for_start(self) -> None:
        await within(self._start.wait())
        self._start.clear()

    def release(self, count: int = 1) -> None:
        for _ in range(count):
            self._release.release()


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_those_who_come_during_a_call_wait_for_the_next_one_together() -> None:
    probe = Probe()
    barrier = AbortBarrier(probe, timeout=10)
    first = asyncio.create_task(barrier.wait())
    await probe.wait_for_start()
    later = [asyncio.create_task(barrier.wait()) for _ in range(20)]
    await settle()
    assert probe.started == 1
    probe.release()
    await within(first)
    await probe.wait_for_start()
    # Their aborts may have been sent after the first call, so it says nothing of them.
    assert not any(task.done() for task in later)
    probe.release()
    await within(asyncio.gather(*later))
    assert probe.started == 2


async def test_a_third_generation_waits_for_a_third_call() -> None:
    probe = Probe()
    barrier = AbortBarrier(probe, timeout=10)
    waits = [asyncio.create_task(barrier.wait())]
    await probe.wait_for_start()
    waits.append(asyncio.create_task(barrier.wait()))
    await settle()
    probe.release()
    await probe.wait_for_start()
    waits.append(asyncio.create_task(barrier.wait()))
    await settle()
    probe.release()
    await probe.wait_for_start()
    assert [task.done() for task in waits] == [True, True, False]
    probe.release()
    await within(asyncio.gather(*waits))
    assert probe.started == 3


async def test_each_of_many_rounds_makes_a_call() -> None:
    probe = Probe()
    probe.release(5)
    barrier = AbortBarrier(probe, timeout=10)
    for _ in range(5):
        await within(barrier.wait())
    assert probe.started == 5


async def test_a_long_step_is_not_waited_for_beyond_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe()
    barrier = AbortBarrier(probe, timeout=0.01)
    await within(barrier.wait())
    assert "did not confirm an abort" in caplog.text
    # The call still runs, so the next waiter waits for one after it.
    second = asyncio.create_task(barrier.wait())
    probe.release(2)
    await within(second)
    assert probe.started == 2


@pytest.mark.parametrize("error", [RuntimeError("ranks disagree"), OSError("gone")])
async def test_a_call_that_fails_ends_the_wait(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    probe = Probe()
    probe.errors.append(error)
    probe.release(2)
    barrier = AbortBarrier(probe, timeout=10)
    await within(barrier.wait())
    assert str(error) in caplog.text
    await within(barrier.wait())
    assert probe.started == 2


async def test_a_waiter_that_is_cancelled_takes_no_other_with_it() -> None:
    probe = Probe()
    barrier = AbortBarrier(probe, timeout=10)
    first, second = asyncio.create_task(barrier.wait()), None
    await probe.wait_for_start()
    second, third = asyncio.create_task(barrier.wait()), asyncio.create_task(barrier.wait())
    await settle()
    first.cancel()
    second.cancel()
    probe.release(2)
    await within(third)
    assert probe.started == 2
