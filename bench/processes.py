"""The processes of a run, each in its own session, so that an engine that outlives its server can be terminated too."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec
import psutil

from bench import caller, contenders, engine
from bench.cases import Case
from bench.measure import MemoryGrowth, Sample
from tokenwire import Client, HealthStatus, TokenwireError

_START_TIMEOUT = 300.0
_ANSWER_TIMEOUT = 600.0
_STOP_TIMEOUT = 20.0
_POLL_INTERVAL = 0.1
"""Seconds; the timeouts are far above what working processes need."""

_Answer = TypeVar("_Answer", Sample, MemoryGrowth)


class BenchError(Exception):
    """A contender cannot be measured."""


class _Session:
    """A process and its descendants."""

    def __init__(self, command: list[str], log: Path, *, piped: bool = False) -> None:
        """Start the process.

        Args:
            command: the command line.
            log: file for stderr, and for stdout unless piped.
            piped: whether stdin and stdout are pipes.

        """
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=engine.ROOT,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )

    def failure(self, what: str) -> BenchError:
        """Return an error with the last line of the process's log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return BenchError(f"{what} (log: {self._log}): {lines[-1] if lines else 'no output'}")

    def terminate(self) -> None:
        """Terminate the process and all processes of its session, and kill what remains after a timeout."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_TIMEOUT)
        while (remaining := list(_in_session(self.process.pid))) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


class Server(_Session):
    """A server process."""

    def __init__(self, name: str, model: str, step_ms: float, logs: Path) -> None:
        """Start a server on a free port.

        Args:
            name: name of the server, as in `engine.command`.
            model: the model folder.
            step_ms: duration of an engine step, in milliseconds.
            logs: folder for its log.

        """
        self.name = name
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        # If the run is killed, the server still terminates, and its engine with it; a caller exits at the end of stdin.
        death_signal = ["setpriv", "--pdeathsig", "TERM", "--"]
        super().__init__([*death_signal, *engine.command(name, model, step_ms, port)], logs / f"server-{name}.log")

    def wait_ready(self) -> None:
        """Wait until the server is healthy.

        Raises:
            BenchError: the server has exited, or is not healthy in time.

        """
        deadline = time.monotonic() + _START_TIMEOUT
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise self.failure(f"the {self.name} server exited")
            if time.monotonic() > deadline:
                raise self.failure(f"the {self.name} server is not ready after {_START_TIMEOUT:g} s")
            time.sleep(_POLL_INTERVAL)

    def is_healthy(self) -> bool:
        """Run one health check."""
        with contextlib.ExitStack() as stack:
            return self.health_check(stack)()

    def health_check(self, stack: contextlib.ExitStack) -> Callable[[], bool]:
        """Return a function that runs a health check on one connection, which `stack` closes."""
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
    """The caller process of a contender."""

    def __init__(self, name: str, address: str, server_pid: int, logs: Path) -> None:
        """Start a caller.

        Args:
            name: name of the contender.
            address: address of the server; MODEL@STEP_MS for the in-process engine.
            server_pid: process id of the server; 0 for the in-process engine.
            logs: folder for its log.

        """
        self._name = name
        python = engine.PYTHON if name == contenders.IN_PROCESS else engine.BENCH_PYTHON
        command = [str(python), "-m", "bench.caller", name, address, str(server_pid)]
        super().__init__(command, logs / f"caller-{name}.log", piped=True)

    def wait_ready(self) -> None:
        """Wait until the caller is connected.

        Raises:
            BenchError: the caller has exited, or is not connected in time.

        """
        self._read("ready", _START_TIMEOUT)

    def run(self, case: Case, seed: int) -> Sample:
        """Return the sample of one run of a case.

        Args:
            case: the case.
            seed: seed of the prompts.


        Raises:
            BenchError: the caller has failed.

        """
        return self._send(caller.RunCase(case=case, seed=seed), Sample)

    def cancel(self, streams: int) -> MemoryGrowth:
        """Return the memory growth while streams are opened and cancelled.

        Raises:
            BenchError: the caller has failed.

        """
        return self._send(caller.CancelStreams(streams=streams), MemoryGrowth)

    def _send(self, command: caller.Command, answer_type: type[_Answer]) -> _Answer:
        commands = cast("IO[bytes]", self.process.stdin)
        try:
            commands.write(msgspec.json.encode(command) + b"\n")
            commands.flush()
        except OSError:
            raise self.failure("the caller has exited") from None
        answer = self._read(caller.ANSWER_PREFIX, _ANSWER_TIMEOUT)
        with contextlib.suppress(msgspec.ValidationError):
            raise BenchError(msgspec.json.decode(answer, type=caller.Failure).message)
        return msgspec.json.decode(answer, type=answer_type)

    def _read(self, prefix: str, timeout: float) -> bytes:
        """Read lines until one starts with the prefix and return the rest of that line."""
        watchdog = threading.Timer(timeout, self.process.kill)
        watchdog.start()
        try:
            for line in cast("IO[bytes]", self.process.stdout):
                if line.startswith(prefix.encode()):
                    return line.removeprefix(prefix.encode())
        finally:
            watchdog.cancel()
        raise self.failure(f"the caller exited, or was killed after {timeout:g} s without an answer")


def _environment() -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # gRPC starts threads, and a forked process of a multi-threaded one can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def _in_session(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _http_health(address: str) -> bool:
    # Not urllib, which honours the proxy settings of the environment.
    try:
        with socket.create_connection(address.rsplit(":", 1), timeout=10.0) as connection:  # type: ignore[arg-type]
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
