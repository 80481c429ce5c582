"""`tokenwire serve` as a subprocess."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from harness import processes

READY_PREFIX = "tokenwire: serving "

_POLL_INTERVAL = 0.02
COMMAND = Path(sys.executable).with_name("tokenwire")
"""The `tokenwire` command of the environment that the tests run in."""


class ServerFailedError(Exception):
    """The server ended or hung before it was ready; the message holds its output."""


class ServerProcess:
    """A `tokenwire serve` process in a session of its own, ready when the block is entered, gone when it is left.

        with ServerProcess(["MODEL_DIR", "--simulated-device", "step_ms=1"]) as server:
            client = tokenwire.Client(server.address)

    `--port 0` is put before the arguments. Leaving the block stops the server with SIGTERM, and fails the test if a process outlives it.
    Nothing is left in either case: what there is gets killed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        wait: bool = True,
        ready_timeout: float = 100.0,
        stop_timeout: float = 45.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a server; entering the block starts it.

        Args:
            arguments: what follows `tokenwire serve`.
            wait: whether entering the block waits for the ready line; else `wait_ready` does.
            ready_timeout: seconds to wait for the ready line.
            stop_timeout: seconds to wait for the end after a signal.
            environment: variables beside those of this process.

        """
        self._arguments = list(arguments)
        self._wait = wait
        self._ready_timeout = ready_timeout
        self._stop_timeout = stop_timeout
        self._environment = processes.environment() | dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="tokenwire-server-")
        self._process: subprocess.Popen[bytes] | None = None
        self._output: dict[str, str] = {}
        self.address = ""
        """Where the server listens; known once it is ready."""
        self.leftovers: list[processes.Process] = []
        """What was still alive some seconds after the server's own end; known after `wait`."""

    @property
    def pid(self) -> int:
        """The server's process id, also its session and its process group."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What the server and its engine have written to the standard output."""
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        """What the server and its engine have written to the standard error."""
        return self._read("stderr")

    @property
    def log(self) -> str:
        """Both, for a message to a person."""
        return f"--- stdout of {' '.join(self._arguments)}\n{self.stdout}\n--- stderr\n{self.stderr}\n"

    def engine_pids(self) -> list[int]:
        """Return the living processes of vLLM that belong to the server."""
        return [process.pid for process in processes.in_session(self.pid) if process.is_engine]

    def _start(self) -> None:
        command: list[str | Path] = [COMMAND, "serve", "--port", "0", *self._arguments]
        folder = Path(self._folder.name)
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=self._environment,
                start_new_session=True,
            )

    def wait_ready(self) -> str:
        """Wait for the ready line and return the address in it.

        Raises:
            ServerFailedError: the server ended, or has not become ready in time.

        """
        deadline = time.monotonic() + self._ready_timeout
        while True:
            exit_code = self._poll()
            # Line by line: the last one may still be half written.
            for line in self.stdout.splitlines(keepends=True):
                if line.startswith(READY_PREFIX) and line.endswith("\n"):
                    self.address = line.rstrip("\n").rpartition(" on ")[2]
                    return self.address
            if exit_code is not None:
                raise ServerFailedError(f"the server ended with exit code {exit_code}\n{self.log}")
            if time.monotonic() > deadline:
                raise ServerFailedError(f"the server is not ready after {self._ready_timeout:g} s\n{self.log}")
            time.sleep(_POLL_INTERVAL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server's process alone."""
        os.kill(self.pid, number)

    def wait(self, *, leftovers_timeout: float = 20.0) -> int:
        """Wait for the server's end and return its exit code, which is negative for a signal's number.

        Then everything of its session has `leftovers_timeout` seconds to end; `leftovers` is what has not.

        Raises:
            subprocess.TimeoutExpired: the server goes on.

        """
        assert self._process is not None, "the server has not been started"
        exit_code = self._process.wait(self._stop_timeout)
        self.leftovers = processes.wait_until_empty(self.pid, leftovers_timeout)
        return exit_code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit code. Nothing of the server lives afterwards."""
        try:
            if self._poll() is None:
                self.send(number)
            return self.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the server and everything of its session, whatever their state. Safe to repeat."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            processes.kill_session(self.pid)

    def __enter__(self) -> Self:
        try:
            self._start()
            if self._wait:
                self.wait_ready()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if exc is not None:
                # pytest shows it with the failure.
                sys.stderr.write(self.log)
            ended_before = self._poll() is not None
            exit_code = self.stop()
            if exc is None and not ended_before:
                assert exit_code == 0, f"the server ended with exit code {exit_code}\n{self.log}"
                assert not self.leftovers, f"the server left processes behind: {self.leftovers}\n{self.log}"
        finally:
            self._discard()

    def _discard(self) -> None:
        self.kill()
        self._output = {"stdout": self.stdout, "stderr": self.stderr}
        self._folder.cleanup()

    def _poll(self) -> int | None:
        assert self._process is not None, "the server has not been started"
        return self._process.poll()

    def _read(self, name: str) -> str:
        if name in self._output:
            return self._output[name]
        path = Path(self._folder.name) / name
        return path.read_text(errors="replace") if path.exists() else ""
