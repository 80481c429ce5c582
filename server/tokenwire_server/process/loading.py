"""Loads an engine in the background, and stops a load that has not completed.

vLLM loads in a thread, which cannot be interrupted, and in child processes, which can be terminated.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import engine_dead
from tokenwire_server.process import orphans
from tokenwire_server.process.liveness import wait_for_death

logger = logging.getLogger(__name__)

_THREAD = "tokenwire load"
_INTERVAL = 0.2
"""Seconds between attempts to terminate the child processes of a load."""
_GRACE = 3.0
"""Seconds for child processes to exit before they are killed."""
_LIMIT = 10.0
"""Maximum seconds to wait for the load to stop; its thread may be in the middle of a download, for example."""


class Loading:
    """The load of one engine, from the start of its processes until it is ready for requests."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Start loading; requires a running event loop.

        Args:
            build: builds the engine; blocks until it is loaded.

        """
        self._build = build
        self._others = orphans.children()
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[Engine] = self._loop.create_future()
        # Not in the event loop's executor, which the loop would wait for when it is closed.
        threading.Thread(target=self._run, name=_THREAD, daemon=True).start()

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:  # noqa: BLE001  # raised on the event loop
            self._settle(self._built.set_exception, error)
        else:
            self._settle(self._built.set_result, engine)
            threading.current_thread().name = f"{_THREAD}, done"
            # The kernel treats the exit of the thread that started a process as the exit of its parent (see `orphans`).
            threading.Event().wait()

    def _settle(self, settle: Callable[..., None], value: object) -> None:
        def settle_unless_left() -> None:
            if not self._built.done():
                settle(value)

        # The loop is closed if nobody is waiting any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle_unless_left)

    async def engine(self) -> Engine:
        """Wait until the engine is ready.

        Returns:
            The engine.

        Raises:
            RequestError: the engine has died, ENGINE_DEAD, or the model cannot generate, UNSUPPORTED_METHOD.
            Exception: whatever vLLM raises for a model that cannot be loaded.

        """
        engine = await asyncio.shield(self._built)
        starting = asyncio.create_task(engine.start())
        # vLLM waits forever for a response from an engine that has died.
        dying = asyncio.create_task(wait_for_death(engine, 0))
        try:
            await asyncio.wait({starting, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise engine_dead()
            await starting
        finally:
            dying.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
        return engine

    async def end(self) -> None:
        """Stop a load that has not completed, within seconds; child processes that do not exit are killed."""
        begin = time.monotonic()
        while not self._built.done() and time.monotonic() - begin < _LIMIT:
            self._end_processes(force=time.monotonic() - begin > _GRACE)
            await asyncio.wait({self._built}, timeout=_INTERVAL)
        if not self._built.done():
            logger.warning("loading did not stop in time; exiting without waiting for it")
            self._built.cancel()
            return
        if self._built.exception() is None:
            await asyncio.to_thread(self._built.result().shutdown)

    def kill_processes(self) -> None:
        """Kill the remaining child processes of the load."""
        self._end_processes(force=True)

    def _end_processes(self, *, force: bool) -> None:
        orphans.end_descendants(force=force, spare=self._others)


def is_running() -> bool:
    """Return whether a load is still running; the interpreter must not shut down normally in that case."""
    return any(thread.name == _THREAD for thread in threading.enumerate())
