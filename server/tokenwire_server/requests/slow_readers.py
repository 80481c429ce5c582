"""Ends streams whose callers have stopped reading.

A stream is blocked while a write waits for the caller to read. Its writer records when the write started, which costs
next to nothing, and one task checks all streams twice a second: there is no timer per message and no task per stream.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from operator import itemgetter

from tokenwire._contract import Reason
from tokenwire_server.errors import RequestError

_INTERVAL = 0.5
"""Maximum seconds between two checks."""
_SHORT_STALL = 1.0
"""Seconds that a reader may be blocked without a limit on the values waiting."""
_MAX_WAITING = 500_000
"""Maximum number of values (token ids, log probabilities) waiting for one reader blocked for longer: about 30 MB."""
_MAX_WAITING_TOGETHER = 5_000_000
"""Maximum total of values waiting for all such readers; those with the most values waiting are ended first."""


class Reader:
    """The reader of a stream. Abstract: the kinds of streams implement it."""

    __slots__ = ()

    def blocked_since(self) -> float | None:
        """Return the `time.monotonic` time at which the write in progress started; None if there is none."""
        raise NotImplementedError

    def waiting(self) -> int:
        """Return the number of values waiting to be written."""
        raise NotImplementedError

    def give_up(self, error: RequestError) -> None:
        """Abort the stream's requests, discard what is waiting, and fail with the error once the write returns."""
        raise NotImplementedError


class SlowReaders:
    """Watches the readers of all streams and ends those that are too slow."""

    def __init__(self, timeout: float) -> None:
        """Make a watch without readers.

        Args:
            timeout: maximum seconds that a reader may be blocked.

        """
        self._timeout = timeout
        self._readers: set[Reader] = set()

    @contextlib.contextmanager
    def watch(self, reader: Reader) -> Iterator[None]:
        """Watch a reader inside the block."""
        self._readers.add(reader)
        try:
            yield
        finally:
            self._readers.discard(reader)

    async def run(self) -> None:
        """Check the readers periodically until cancelled."""
        while True:
            await asyncio.sleep(min(_INTERVAL, self._timeout / 2))
            now = time.monotonic()
            for reader in self._too_slow(now):
                self._readers.discard(reader)
                reader.give_up(
                    RequestError(
                        Reason.SLOW_READER,
                        "the stream was not read for too long; its requests were aborted (--slow-reader-timeout)",
                    )
                )

    def _too_slow(self, now: float) -> list[Reader]:
        found, waiting = [], []
        for reader in self._readers:
            since = reader.blocked_since()
            stalled = 0.0 if since is None else now - since
            if stalled > self._timeout:
                found.append(reader)
            elif stalled > _SHORT_STALL:
                waiting.append((reader.waiting(), reader))
        together = 0
        for values, reader in sorted(waiting, key=itemgetter(0)):
            together += values
            if values > _MAX_WAITING or together > _MAX_WAITING_TOGETHER:
                found.append(reader)
        return found
