"""Knowing that the engine has acted on an abort."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class AbortBarrier:
    """Waits until the engine has seen everything that was sent to it before.

    AsyncLLM.abort only sends. Aborts and utility calls travel to the engine in one queue, so a utility call that
    returns has passed every abort sent before it. Waiters share calls: those who come while one is under way, which may
    have been sent before their abort, wait for the next one together.
    """

    def __init__(self, probe: Callable[[], Awaitable[object]], timeout: float) -> None:
        """Make a barrier.

        Args:
            probe: the utility call.
            timeout: seconds after which a waiter goes on all the same; the engine may be in a long step.

        """
        self._probe = probe
        self._timeout = timeout
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait for the engine, at most the timeout."""
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
        except Exception as error:  # noqa: BLE001  # a dead engine, or ranks that disagree: it has acted either way
            logger.debug("the abort barrier's call failed: %r", error)
