"""Subprocesses in sessions of their own, so that whatever they start can be found and ended."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_ended: set[int] = set()
"""Sessions whose leader has been waited for: nothing should live in them."""
_unchecked: set[int] = set()
"""Those of them that `stray_processes` has not looked at."""

_POLL_INTERVAL = 0.05


class Process(NamedTuple):
    """A living process of a session."""

    pid: int
    command: str

    @property
    def is_engine(self) -> bool:
        """Whether it is one of vLLM's: VLLM::EngineCore, VLLM::Worker."""
        return self.command.startswith("VLLM::")


def in_session(*sessions: int) -> list[Process]:
    """Return the living processes of some sessions; zombies are dead."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # quick
        if not name.isdecimal():
            continue
        # A process may end between two looks. Plain system calls: waits look every few milliseconds.
        with contextlib.suppress(OSError):
            folder = f"/proc/{name}"
            # After the name, which stands in parentheses and may hold anything: state, parent, group, session.
            fields = _read(f"{folder}/stat").rpartition(b")")[2].split(maxsplit=4)
            if int(fields[3]) in sessions and fields[0] not in {b"Z", b"X"}:
                command = _read(f"{folder}/cmdline").decode(errors="replace").replace("\0", " ").strip()
                found.append(Process(int(name), command))
    return found


def wait_until_empty(session: int, timeout: float) -> list[Process]:
    """Wait until a session has no living process and return those that are there after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while processes := in_session(session):
        if time.monotonic() > deadline:
            return processes
        time.sleep(_POLL_INTERVAL)
    return []


def kill_session(session: int) -> None:
    """Kill every process of a session whose leader has ended, and wait until they are gone."""
    _ended.add(session)
    _unchecked.add(session)
    while found := in_session(session):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL)


class Finished(NamedTuple):
    """A command that has ended by itself."""

    exit_code: int
    stdout: str
    stderr: str


def run(command: Sequence[str | Path], *, timeout: float = 100.0) -> Finished:
    """Run a command in a session of its own to its end; whatever it has started is gone then.

    Raises:
        subprocess.TimeoutExpired: it has not ended, or something that it left behind holds its output open.

    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
            process.wait()
            kill_session(process.pid)
    return Finished(process.returncode, stdout, stderr)


def environment() -> dict[str, str]:
    """Return the environment for a command that runs vLLM: this process's, and what makes tests quick."""
    return os.environ | {
        # vLLM asks nobody for anything.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # --enforce-eager leaves two helpers of the sampler to torch.compile, which stops the engine at its first step
        # with log probabilities, and at the first with several sequences: on the CPU for 10 s to 100 s.
        "TORCHDYNAMO_DISABLE": "1",
    }


def stray_processes(*, of_all: bool = False) -> list[Process]:
    """Return the processes that live in sessions that have ended: there must be none.

    Args:
        of_all: look at every session so far; else at those that have ended since the last call, which is quick.

    """
    sessions = _ended if of_all else _unchecked
    found = in_session(*sessions) if sessions else []
    _unchecked.clear()
    return found


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)
