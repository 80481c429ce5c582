"""An event loop in a background thread, for the blocking client."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tokenwire._errors import ClientClosedError

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for callers in other threads until it is stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
        self._started = concurrent.futures.Future()
        # A daemon thread, so that a client that was not closed does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="tokenwire-client", daemon=True)
        self._thread.start()
        self._loop, self._stop = self._started.result()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine and return its result. Interrupting the wait, with Ctrl-C for example, cancels it."""
        with self._lock:
            # A forked child process has this object but not its thread.
            if not self._thread.is_alive() or self._stop.is_set():
                coroutine.close()
                raise ClientClosedError("the client is closed, or was created before this process was forked")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosedError("the client was closed during the call") from None
        finally:
            future.cancel()

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine, cancel the others and end the thread. Safe to call again."""
        if threading.current_thread() is self._thread:
            # The client was garbage-collected in this thread, whose loop cannot wait for itself.
            last.close()
            self._stop.set()
            return
        try:
            self.run(last)
        except ClientClosedError:
            return
        with self._lock:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        stop = asyncio.Event()
        self._started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
