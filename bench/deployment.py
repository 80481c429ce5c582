"""The servers and callers of a run for one step time."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from bench import contenders
from bench.processes import BenchError, Caller, Server


class Deployment:
    """The servers and callers for one step time; a context manager that starts and terminates them."""

    def __init__(self, model: str, step_ms: float, logs: Path) -> None:
        """Configure the processes.

        Args:
            model: the model folder.
            step_ms: duration of an engine step, in milliseconds.
            logs: folder for the logs.

        """
        self.servers: dict[str, Server] = {}
        self.callers: dict[str, Caller] = {}
        self.failures: dict[str, str] = {}
        """Error message per contender that could not be started."""
        self._model = model
        self._step_ms = step_ms
        self._logs = logs
        self._failed: list[Caller] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._terminate()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._terminate()

    def _start(self) -> None:
        names = {entry.server for entry in contenders.CONTENDERS.values() if entry.server is not None}
        self.servers = {name: Server(name, self._model, self._step_ms, self._logs) for name in sorted(names)}
        in_process = Caller(contenders.IN_PROCESS, f"{self._model}@{self._step_ms:g}", 0, self._logs)
        self.callers[contenders.IN_PROCESS] = in_process
        for name, entry in contenders.CONTENDERS.items():
            try:
                if entry.server is not None:
                    server = self.servers[entry.server]
                    server.wait_ready()
                    self.callers[name] = Caller(name, server.address, server.process.pid, self._logs)
                self.callers[name].wait_ready()
            except BenchError as error:
                self.failures[name] = str(error)
                self._failed += [self.callers.pop(name)] if name in self.callers else []

    def _terminate(self) -> None:
        sessions = (*self.callers.values(), *self._failed, *self.servers.values())
        threads = [threading.Thread(target=session.terminate) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
