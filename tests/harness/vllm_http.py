"""vLLM's own HTTP server, to compare with: its process and all that it starts are gone when the block is left."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from harness import processes

_READY_TIMEOUT = 200.0
_STOP_TIMEOUT = 20.0
_POLL = 0.2


@contextlib.contextmanager
def vllm_server(arguments: Sequence[str], log: Path) -> Iterator[httpx.Client]:
    """Run `vllm serve` on a free port of this machine, and give a client of it.

    Args:
        arguments: what follows `vllm serve`: the model first.
        log: file for what it writes.

    """
    model, *options = arguments
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=processes.environment(),
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100.0, trust_env=False) as client:
            _wait_ready(client, process, log)
            yield client
    finally:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(_STOP_TIMEOUT)
        finally:
            process.kill()
            process.wait()
            processes.kill_session(process.pid)


def _wait_ready(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT
    while True:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        ended = process.poll() is not None
        assert not ended, f"vLLM's server has ended\n{log.read_text(errors='replace')}"
        assert time.monotonic() < deadline, f"vLLM's server is not ready\n{log.read_text(errors='replace')}"
        time.sleep(_POLL)
