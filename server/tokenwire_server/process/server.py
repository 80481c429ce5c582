"""The server's life cycle: startup, readiness, drain and shutdown.

`Server(config, name, build).run()` runs all of it and returns an exit code.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tokenwire_server.access.files import AccessError
from tokenwire_server.config import ExitCode, ServerConfig
from tokenwire_server.conversion.exceptions import first_line
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError, engine_dead
from tokenwire_server.process import orphans
from tokenwire_server.process.liveness import Death, has_died, wait_for_death
from tokenwire_server.process.loading import Loading
from tokenwire_server.requests.registry import Registry
from tokenwire_server.requests.server_state import State
from tokenwire_server.services import engine as engine_service
from tokenwire_server.services import smg
from tokenwire_server.services.host import Host
from tokenwire_server.transport.server import Transport
from tokenwire_server.transport.unix_socket import BindError

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STATS_INTERVAL = 10.0
"""Seconds between log lines with vLLM's statistics, as in `vllm serve`."""
_END_GRACE = 2.0
"""Seconds for calls whose requests were aborted to send their last message."""
_EXPECTED = (OSError, RequestError, RuntimeError, ValueError)
"""Exceptions that vLLM raises for an invalid model or configuration; the message suffices, without a traceback."""


class Server:
    """A tokenwire server."""

    def __init__(self, config: ServerConfig, name: str, build: Callable[[], Engine]) -> None:
        """Make a server; `run` starts it.

        Args:
            config: the server's own options.
            name: the model's name, for log and error messages.
            build: builds the engine; called in a thread because it blocks until the model is loaded.

        """
        self._config = config
        self._name = name
        self._build = build
        self._host = Host(config)
        self._transport = Transport(config, [engine_service.service(self._host), *smg.services(self._host)])
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until a stop signal or the engine's death; return the exit code."""
        with self._signals():
            try:
                await self._transport.start()
            except (AccessError, BindError) as error:
                return _fail(str(error))
            try:
                return await self._run_with_tasks()
            except ExceptionGroup as group:
                logger.exception("a background task failed; shutting down")
                return _fail(f"a background task failed: {group.exceptions[0]!r}", ExitCode.INTERNAL)
            finally:
                await self._transport.stop(0)

    async def _run_with_tasks(self) -> int:
        """Run with all background tasks in one group: if one fails, all are cancelled and the server shuts down."""
        async with asyncio.TaskGroup() as tasks:
            background: list[asyncio.Task[Any]] = [
                tasks.create_task(self._transport.watch_files(), name="access files")
            ]
            try:
                engine = await self._start_engine()
                if engine is None:
                    return ExitCode.OK if self._stop.is_set() else ExitCode.STARTUP
                watch = tasks.create_task(wait_for_death(engine, self._config.engine_timeout), name="liveness")
                statistics = tasks.create_task(_log_stats(engine), name="statistics")
                slow_readers = tasks.create_task(self._host.slow_readers.run(), name="slow readers")
                background += [watch, statistics, slow_readers]
                return await self._serve(engine, watch)
            finally:
                for task in background:
                    task.cancel()

    async def _start_engine(self) -> Engine | None:
        logger.info("loading %s", self._name)
        orphans.adopt()
        load = Loading(self._build)
        loading = asyncio.create_task(load.engine())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                logger.info("shutting down while loading")
                return None
            return await loading
        except Exception as error:  # whatever vLLM raises for a model that cannot be loaded
            if not isinstance(error, _EXPECTED):
                logger.exception("loading failed with an unexpected exception")
            _fail(f"cannot load {self._name}: {first_line(error)}")
            return None
        finally:
            stopping.cancel()
            if not loading.done():
                loading.cancel()
                await asyncio.wait({loading})
                await load.end()
            if not loading.cancelled() and loading.exception() is None:
                orphans.release()
            else:
                # vLLM leaves child processes behind when loading fails.
                load.kill_processes()

    async def _serve(self, engine: Engine, watch: "asyncio.Task[Death]") -> int:
        """Serve until a stop signal or the engine's death, then shut down; the engine is always closed."""
        registry = Registry(engine, self._config.max_requests_per_client)
        stop = asyncio.create_task(self._stop.wait())
        try:
            self._host.state.serve(engine, registry)
            await self._transport.set_serving(True)
            # Users and scripts wait for this line.
            print(f"tokenwire: serving {self._name} on {self._transport.address}", flush=True)  # noqa: T201
            await asyncio.wait({watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            death = watch.result() if watch.done() else await self._drain(watch, engine, registry)
            return await self._end(engine, registry, death)
        except asyncio.CancelledError:
            # A background task has failed: requests in flight end with ABORT and their tokens so far.
            if self._host.state.current is State.SERVING:
                await self._enter(State.DRAINING)
            await registry.abort_all()
            await self._transport.stop(_END_GRACE)
            raise
        finally:
            stop.cancel()
            await engine.close()

    async def _drain(self, watch: "asyncio.Task[Death]", engine: Engine, registry: Registry) -> Death | None:
        """Wait for requests in flight, then abort the rest; return the engine's death if it dies meanwhile."""
        await self._enter(State.DRAINING)
        if len(registry):
            logger.info(
                "draining: %d requests have %.0f s to finish; a second signal aborts them immediately",
                len(registry),
                self._config.drain_timeout,
            )
        idle = asyncio.create_task(registry.idle())
        now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({idle, now, watch}, timeout=self._config.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        now.cancel()
        if watch.done():
            return watch.result()
        if has_died(engine):  # and has failed its requests before the watch noticed
            return Death.DIED
        if aborted := await registry.abort_all():
            logger.warning("aborted %d requests in flight", aborted)
        return None

    async def _end(self, engine: Engine, registry: Registry, death: Death | None) -> int:
        if death is not None:
            return await self._after_death(death, engine, registry)
        await self._transport.stop(_END_GRACE)
        return ExitCode.OK

    async def _after_death(self, death: Death, engine: Engine, registry: Registry) -> int:
        logger.error("%s", death.value)
        await self._enter(State.DEAD)
        registry.fail_all(engine_dead())
        if self._config.stay_after_engine_death:
            logger.error("refusing all requests until a stop signal (--stay-after-engine-death)")
            # An engine that hangs would hold its device, and resume requests that have already failed.
            await engine.close()
            await self._stop.wait()
        await self._transport.stop(_END_GRACE)
        return ExitCode.ENGINE_DIED

    async def _enter(self, state: State) -> None:
        self._host.state.enter(state)
        await self._transport.set_serving(False)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


async def _log_stats(engine: Engine) -> None:
    while True:
        await asyncio.sleep(_STATS_INTERVAL)
        await engine.log_stats()


def _fail(message: str, code: ExitCode = ExitCode.STARTUP) -> int:
    print(f"tokenwire: error: {message}", file=sys.stderr, flush=True)  # noqa: T201
    return code
