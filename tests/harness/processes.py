"""Subprocesses in sessions of their own, so that whatever they start can be found and ended."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_sessions: set[int] = set()
"""Sessions whose leader has been waited for: nothing should live in them."""

_POLL_INTERVAL = 0.02


class Process(NamedTuple):
    """A living process of a session."""

    pid: int
    command: str

    @property
    def is_engine(self) -> bool:
        """Whether it is one of vLLM's: VLLM::EngineCore, VLLM::Worker."""
        return self.command.startswith("VLLM::")


def in_session(session: int) -> list[Process]:
    """Return the living processes of a session; zombies are dead."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        # A process may end between two looks.
        with contextlib.suppress(OSError):
            # After the name, which stands in parentheses and may hold anything: state, parent, group, session.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                command = (folder / "cmdline").read_text().replace("\0", " ").strip()
                found.append(Process(int(folder.name), command))
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
    _sessions.add(session)
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


def stray_processes() -> list[Process]:
    """Return the processes that live in sessions that have been ended: there must be none."""
    return [process for session in _sessions for process in in_session(session)]
