"""The load of an engine, and its end before it is done.

vLLM loads in a thread, which cannot be interrupted, and in processes, which can.
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
"""Seconds between attempts to end the processes of a load."""
_GRACE = 3.0
"""Seconds for processes to end by themselves."""
_LIMIT = 10.0
"""Seconds for the thread to end once its processes have; it may be in the middle of a download, for example."""


class Loading:
    """An engine on its way, from its processes' start until it is ready for requests."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Begin to load, on the running event loop.

        Args:
            build: builds the engine; blocks for the whole load.

        """
        self._build = build
        self._others = orphans.children()
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[Engine] = self._loop.create_future()
        # Not one of the event loop's own threads, for which the loop's end would wait.
        threading.Thread(target=self._run, name=_THREAD, daemon=True).start()

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:  # noqa: BLE001  # the event loop's side raises it
            self._settle(self._built.set_exception, error)
        else:
            self._settle(self._built.set_result, engine)
            threading.current_thread().name = f"{_THREAD}, done"
            # The kernel takes the end of the thread that started a process for its parent's end (see `orphans`).
            threading.Event().wait()

    def _settle(self, settle: Callable[..., None], value: object) -> None:
        def settle_unless_left() -> None:
            if not self._built.done():
                settle(value)

        # The loop is closed where nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle_unless_left)

    async def engine(self) -> Engine:
        """Wait until the engine is ready. Raises whatever vLLM raises, and RequestError where the engine has died."""
        engine = await asyncio.shield(self._built)
        starting = asyncio.create_task(engine.start())
        # vLLM waits for ever for the answer of an engine that has died.
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
        """End a load that is not done, within seconds: by force where it does not end by itself."""
        begin = time.monotonic()
        while not self._built.done() and time.monotonic() - begin < _LIMIT:
            self._end_processes(force=time.monotonic() - begin > _GRACE)
            await asyncio.wait({self._built}, timeout=_INTERVAL)
        if not self._built.done():
            logger.warning("the load does not end; the process ends without it")
            self._built.cancel()
            return
        with contextlib.suppress(BaseException):
            await asyncio.to_thread(self._built.result().shutdown)

    def kill_processes(self) -> None:
        """Kill what is left of the load's processes."""
        self._end_processes(force=True)

    def _end_processes(self, *, force: bool) -> None:
        orphans.end_descendants(force=force, spare=self._others)


def is_running() -> bool:
    """Return whether a load goes on, which the end of the interpreter had better not meet."""
    return any(thread.name == _THREAD for thread in threading.enumerate())
