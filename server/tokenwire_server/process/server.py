"""The server's life: start, ready, drain, end.

`Server(config, load).run()` does all of it and returns an exit code.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator

from tokenwire_server.access.files import AccessError
from tokenwire_server.config import ExitCode, ServerConfig
from tokenwire_server.conversion.exceptions import first_line
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError, engine_dead
from tokenwire_server.process import orphans
from tokenwire_server.process.liveness import Death, has_died, wait_for_death
from tokenwire_server.process.loading import Loading
from tokenwire_server.requests.reception import Reception
from tokenwire_server.requests.registry import Registry
from tokenwire_server.services import smg
from tokenwire_server.services.engine import EngineServicer
from tokenwire_server.transport.server import BindError, Transport

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STATS_INTERVAL = 10.0
"""Seconds between vLLM's statistics lines, as in `vllm serve`."""
_END_GRACE = 2.0
"""Seconds for calls whose request has been aborted to send their last message."""


_EXPECTED = (OSError, RequestError, RuntimeError, ValueError)
"""What vLLM raises for a model or a configuration that cannot work; its message says enough."""


class Server:
    """A tokenwire server."""

    def __init__(self, config: ServerConfig, name: str, load: Callable[[], Engine]) -> None:
        """Make a server; `run` starts it.

        Args:
            config: the server's own options.
            name: the model's name, for messages.
            load: builds the engine; called in a thread, since it blocks for the whole load.

        """
        self._config = config
        self._name = name
        self._load = load
        self._reception = Reception(config)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until a stop signal or the engine's death; return the exit code."""
        transport = Transport(self._config, EngineServicer(self._reception), smg.services(self._reception))
        with self._signals():
            try:
                await transport.start()
            except (AccessError, BindError) as error:
                return _fail(str(error))
            try:
                engine = await self._start_engine()
                if engine is None:
                    return ExitCode.OK if self._stop.is_set() else ExitCode.STARTUP
                try:
                    return await self._serve(transport, engine)
                finally:
                    await engine.close()
            finally:
                await transport.stop(0)

    async def _start_engine(self) -> Engine | None:
        logger.info("loading %s", self._name)
        load = Loading(self._load)
        loading = asyncio.create_task(load.engine())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                logger.info("stopping while loading")
                loading.cancel()
                await asyncio.wait({loading})
                await load.end()
                return None
            return await loading
        except Exception as error:  # whatever vLLM raises for a model that cannot be loaded
            if not isinstance(error, _EXPECTED):
                logger.exception("the load failed in an unforeseen way")
            _fail(f"cannot load {self._name}: {first_line(error)}")
            return None
        finally:
            stopping.cancel()
            if loading.done() and not loading.cancelled() and loading.exception() is None:
                orphans.release()
            else:
                # What vLLM leaves of a load that has failed.
                load.kill_processes()

    async def _serve(self, transport: Transport, engine: Engine) -> int:
        registry = Registry(engine, self._config.max_requests_per_client)
        self._reception.serve(engine, registry)
        await transport.set_serving(True)
        # The line that people and scripts wait for.
        print(f"tokenwire: serving {self._name} on {transport.address}", flush=True)  # noqa: T201
        stats = asyncio.create_task(_log_stats(engine))
        watch = asyncio.create_task(wait_for_death(engine, self._config.engine_timeout))
        readers = asyncio.create_task(self._reception.slow_readers.run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            await transport.set_serving(False)
            death = watch.result() if watch.done() else await self._drain(watch, engine, registry)
            if death is not None:
                stats.cancel()
                return await self._after_death(death, transport, engine, registry)
            await transport.stop(_END_GRACE)
            return ExitCode.OK
        finally:
            for task in (stats, watch, readers, stop):
                task.cancel()

    async def _after_death(self, death: Death, transport: Transport, engine: Engine, registry: Registry) -> int:
        logger.error("%s", death.value)
        self._reception.engine_died()
        registry.fail_all(engine_dead())
        if self._config.stay_after_engine_death:
            logger.error("staying up to say so; a stop signal ends the process")
            # One that hangs would keep its device, and work on for nobody once it wakes up.
            await engine.close()
            await self._stop.wait()
        await transport.stop(_END_GRACE)
        return ExitCode.ENGINE_DIED

    async def _drain(self, watch: "asyncio.Task[Death]", engine: Engine, registry: Registry) -> Death | None:
        """End all requests, and tell the engine's death where it comes first."""
        self._reception.refuse_new()
        if len(registry):
            logger.info(
                "draining: %d requests have %.0f s to finish; a second signal ends them now",
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
        if has_died(engine):  # which has ended the requests before the watch saw it
            return Death.DIED
        if aborted := await registry.abort_all():
            logger.warning("aborted %d requests that had not finished", aborted)
        return None

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


def _fail(message: str) -> int:
    print(f"tokenwire: error: {message}", file=sys.stderr, flush=True)  # noqa: T201
    return ExitCode.STARTUP
