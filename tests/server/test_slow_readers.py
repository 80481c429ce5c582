"""Who is ended for not reading. `simulated/test_overload.py` has real streams. FIELD_LOG 55."""

import asyncio
from types import SimpleNamespace

import pytest

from tokenwire_server.errors import RequestError
from tokenwire_server.requests import slow_readers
from tokenwire_server.requests.slow_readers import Reader, SlowReaders

TIMEOUT = 60.0
NOW = 1_000_000.0


class Stalled(Reader):
    """A reader that has been blocked for some seconds while values wait for it."""

    def __init__(self, seconds: float | None, waiting: int = 0) -> None:
        self.error: RequestError | None = None
        self._seconds = seconds
        self._waiting = waiting

    def blocked_since(self) -> float | None:
        return None if self._seconds is None else NOW - self._seconds

    def waiting(self) -> int:
        return self._waiting

    def give_up(self, error: RequestError) -> None:
        assert self.error is None
        self.error = error


async def ended(monkeypatch: pytest.MonkeyPatch, *readers: Stalled) -> list[bool]:
    """Let the watch look at readers some times and say which it has ended."""
    monkeypatch.setattr(slow_readers, "_INTERVAL", 0.0)
    monkeypatch.setattr(slow_readers, "time", SimpleNamespace(monotonic=lambda: NOW))
    watch = SlowReaders(TIMEOUT)
    task = asyncio.create_task(watch.run())
    try:
        with watch.watch(readers[0]):
            for reader in readers[1:]:
                watch._readers.add(reader)
            for _ in range(10):
                await asyncio.sleep(0)
    finally:
        task.cancel()
    assert all(reader.error is None or reader.error.reason == "SLOW_READER" for reader in readers)
    return [reader.error is not None for reader in readers]


@pytest.mark.parametrize(
    ("seconds", "waiting", "is_ended"),
    [
        (None, 10**9, False),
        (0.1, 10**9, False),
        (30.0, 400_000, False),
        (30.0, 600_000, True),
        (61.0, 0, True),
    ],
    ids=["reads", "a short stall", "within the limits", "too much waits", "too long"],
)
async def test_one_reader(monkeypatch: pytest.MonkeyPatch, seconds: float | None, waiting: int, is_ended: bool) -> None:
    assert await ended(monkeypatch, Stalled(seconds, waiting)) == [is_ended]


async def test_what_waits_for_all_together_is_limited_and_the_largest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [Stalled(5.0, 1000) for _ in range(100)]
    large = [Stalled(5.0, 400_000) for _ in range(20)]
    reading = [Stalled(None, 400_000) for _ in range(20)]
    result = await ended(monkeypatch, *small, *large, *reading)
    # Twelve times 400,000 and the small ones are less than five million.
    assert (sum(result[:100]), sum(result[100:120]), sum(result[120:])) == (0, 8, 0)
