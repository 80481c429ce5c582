"""The processes of a run, each in a session of its own, so that an engine which outlives its server is ended too."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar, cast

import msgspec
import psutil

from bench import caller, contenders, engine
from bench.cases import Case
from bench.measure import Memory, Sample
from tokenwire import Client, HealthStatus, TokenwireError

_START_TIMEOUT = 300.0
_ANSWER_TIMEOUT = 600.0
_STOP_TIMEOUT = 20.0
_POLL_INTERVAL = 0.1

_Answer = TypeVar("_Answer", Sample, Memory)


class BenchError(Exception):
    """A contender that cannot be measured."""


class _Session:
    """A process and whatever it starts."""

    def __init__(self, command: list[str], log: Path, *, talks: bool = False) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=engine.ROOT,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )

    def failure(self, what: str) -> BenchError:
        """Give the error for a process that did not do what it should."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return BenchError(f"{what} (log: {self._log}): {lines[-1] if lines else 'no output'}")

    def end(self) -> None:
        """End it, and everything in its session."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_TIMEOUT)
        while (left := list(_in_session(self.process.pid))) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


class Server(_Session):
    """A server process."""

    def __init__(self, name: str, model: str, step_ms: float, logs: Path) -> None:
        self.name = name
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        # Where the run is killed the server still ends, and ends its engine; a caller ends with its standard input.
        bound = ["setpriv", "--pdeathsig", "TERM", "--"]
        super().__init__([*bound, *engine.command(name, model, step_ms, port)], logs / f"server-{name}.log")

    def wait_ready(self) -> None:
        """Wait until it takes requests. Raises BenchError."""
        deadline = time.monotonic() + _START_TIMEOUT
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise self.failure(f"the server of {self.name} ended")
            if time.monotonic() > deadline:
                raise self.failure(f"the server of {self.name} is not ready after {_START_TIMEOUT:g} s")
            time.sleep(_POLL_INTERVAL)

    def is_healthy(self) -> bool:
        """Ask its health once."""
        with contextlib.ExitStack() as stack:
            return self.health_check(stack)()

    def health_check(self, stack: contextlib.ExitStack) -> Callable[[], bool]:
        """Give a function that asks for the health on one connection, which `stack` closes."""
        if self.name == "http":
            return lambda: _http_health(self.address)
        client = stack.enter_context(Client(self.address, connect_timeout=1.0))

        def check() -> bool:
            try:
                return client.health(timeout=10.0) is HealthStatus.SERVING
            except TokenwireError:
                return False

        return check


class Caller(_Session):
    """A contender's caller process."""

    def __init__(self, name: str, address: str, server_pid: int, logs: Path) -> None:
        self._name = name
        python = engine.PYTHON if name == contenders.IN_PROCESS else engine.BENCH_PYTHON
        command = [str(python), "-m", "bench.caller", name, address, str(server_pid)]
        super().__init__(command, logs / f"caller-{name}.log", talks=True)

    def wait_ready(self) -> None:
        """Wait until it is connected. Raises BenchError."""
        self._read("ready", _START_TIMEOUT)

    def run(self, case: Case, seed: int) -> Sample:
        """Measure once. Raises BenchError."""
        return self._ask(caller.RunCase(case=case, seed=seed), Sample)

    def cancel(self, streams: int) -> Memory:
        """Open and cancel streams. Raises BenchError."""
        return self._ask(caller.CancelStreams(streams=streams), Memory)

    def _ask(self, command: caller.Command, answer_type: type[_Answer]) -> _Answer:
        commands = cast("IO[bytes]", self.process.stdin)
        try:
            commands.write(msgspec.json.encode(command) + b"\n")
            commands.flush()
        except OSError:
            raise self.failure("its caller has ended") from None
        answer = self._read(caller.MARK, _ANSWER_TIMEOUT)
        with contextlib.suppress(msgspec.ValidationError):
            raise BenchError(msgspec.json.decode(answer, type=caller.Failure).message)
        return msgspec.json.decode(answer, type=answer_type)

    def _read(self, mark: str, timeout: float) -> bytes:
        """Read up to the line that begins with `mark` and return what follows the mark."""
        watchdog = threading.Timer(timeout, self.process.kill)
        watchdog.start()
        try:
            for line in cast("IO[bytes]", self.process.stdout):
                if line.startswith(mark.encode()):
                    return line.removeprefix(mark.encode())
        finally:
            watchdog.cancel()
        raise self.failure(f"its caller ended, or was ended after {timeout:g} s without an answer")


class Running:
    """The servers and callers of one step time: started together, ended together."""

    def __init__(self, model: str, step_ms: float, logs: Path) -> None:
        self.servers: dict[str, Server] = {}
        self.callers: dict[str, Caller] = {}
        self.failures: dict[str, str] = {}
        """Contenders that could not be started, and why."""
        self._model = model
        self._step_ms = step_ms
        self._logs = logs
        self._broken: list[Caller] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _start(self) -> None:
        names = {entry.server for entry in contenders.CONTENDERS.values() if entry.server is not None}
        self.servers = {name: Server(name, self._model, self._step_ms, self._logs) for name in sorted(names)}
        own = Caller(contenders.IN_PROCESS, f"{self._model}@{self._step_ms:g}", 0, self._logs)
        self.callers[contenders.IN_PROCESS] = own
        for name, entry in contenders.CONTENDERS.items():
            try:
                if entry.server is not None:
                    server = self.servers[entry.server]
                    server.wait_ready()
                    self.callers[name] = Caller(name, server.address, server.process.pid, self._logs)
                self.callers[name].wait_ready()
            except BenchError as error:
                self.failures[name] = str(error)
                self._broken += [self.callers.pop(name)] if name in self.callers else []

    def _end(self) -> None:
        sessions = (*self.callers.values(), *self._broken, *self.servers.values())
        threads = [threading.Thread(target=session.end) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _environment() -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # gRPC has threads, and a fork of a process with threads can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def _in_session(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _http_health(address: str) -> bool:
    # By hand: urllib would follow a proxy of the environment.
    try:
        with socket.create_connection(address.rsplit(":", 1), timeout=10.0) as connection:  # type: ignore[arg-type]
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
