"""A load that does not get to its end: a stop signal, a process that dies. Nothing of it is left.

The engine is the CPU's, with a tiny model of random weights.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import ServerProcess
from harness.processes import in_session
from tokenwire_server.simulated_device import write_model_folder

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1]
OPTIONS = ["--load-format", "dummy", "--enforce-eager", "--max-model-len", "512"]
MEMORY = ["--kv-cache-memory-bytes", "16777216", "--gpu-memory-utilization", "0.1"]


@contextlib.contextmanager
def loading(folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    model = write_model_folder(folder / "model")
    environment = {"PYTHONPATH": str(TESTS), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    command = [str(model), *OPTIONS, *MEMORY, *arguments]
    with ServerProcess(command, wait=False, stop_timeout=200, environment=environment) as server:
        yield server


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


def check_failed(server: ServerProcess) -> None:
    assert server.wait(leftovers_timeout=5) == 3, server.log
    assert not server.leftovers
    errors = [line for line in server.stderr.splitlines() if line.startswith("tokenwire: error: ")]
    assert len(errors) == 1, server.log
    assert errors[0].startswith("tokenwire: error: cannot load "), server.log


def test_a_signal_ends_a_load_that_hangs(tmp_path: Path) -> None:
    with loading(tmp_path, "--worker-cls", "harness.worker.HangingWorker") as server:
        until(lambda: "the worker hangs" in server.stderr)
        server.send(signal.SIGTERM)
        assert server.wait(leftovers_timeout=5) == 0, server.log
        assert not server.leftovers
        assert "shutting down while loading" in server.stderr
        assert "tokenwire: serving" not in server.stdout
        assert "Traceback" not in server.stderr


def test_the_engine_process_is_killed_while_its_workers_start(tmp_path: Path) -> None:
    with loading(tmp_path, "--tensor-parallel-size", "2") as server:
        until(lambda: len(in_session(server.pid)) >= 5)  # server, resource tracker, engine, two workers
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        check_failed(server)


def test_a_worker_process_dies_at_its_import(tmp_path: Path) -> None:
    with loading(tmp_path, "--worker-cls", "harness.no_such_worker.Worker") as server:
        check_failed(server)
