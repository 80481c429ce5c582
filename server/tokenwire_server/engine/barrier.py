"""A barrier after aborts: waits until the engine has processed them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class AbortBarrier:
    """Waits until the engine has processed everything that was sent to it before.

    AsyncLLM.abort returns once the abort is sent. Aborts and utility calls share one FIFO queue into the engine, so when a
    utility call returns, the engine has processed every abort sent before it. Concurrent waiters share utility calls: a
    call in flight may have been sent before a new waiter's abort, so all new waiters share the next call.
    """

    def __init__(self, probe: Callable[[], Awaitable[object]], timeout: float) -> None:
        """Create a barrier.

        Args:
            probe: makes a utility call.
            timeout: maximum time in seconds that `wait` blocks; the engine may be in a long step.

        """
        self._probe = probe
        self._timeout = timeout
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until the engine has processed all aborts sent so far, or until the timeout."""
        if self._running is None or self._running.done():
            task = self._running = asyncio.create_task(self._call(None))
        else:
            if self._next is None or self._next.done():
                self._next = asyncio.create_task(self._call(self._running))
            task = self._next
        done, _ = await asyncio.wait({task}, timeout=self._timeout)
        if not done:
            logger.warning("the engine did not confirm an abort within %.0f s; it may be in a long step", self._timeout)

    async def _call(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait({previous})
            self._running, self._next = self._next, None
        try:
            await self._probe()
        except Exception as error:  # noqa: BLE001  # the engine is dead or its ranks disagree; its aborts are done either way
            logger.debug("the utility call of the abort barrier failed: %r", error)
