"""vLLM's own HTTP server, to compare with."""

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


class VllmServer:
    """A `vllm serve` on a free port of this machine."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        model, *options = arguments
        module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*module, "--model", model, *options, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=processes.environment(),
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100.0, trust_env=False)

    def wait_ready(self) -> None:
        """Wait until the server answers; a test fails where it does not."""
        deadline = time.monotonic() + _READY_TIMEOUT
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").is_success:
                    return
            late = time.monotonic() > deadline
            if late or self._process.poll() is not None:
                what = "is not ready" if late else "has ended"
                raise AssertionError(f"vLLM's server {what}\n{self._log.read_text(errors='replace')}")
            time.sleep(_POLL)

    def stop(self) -> None:
        """End the server and everything that it has started."""
        self.client.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.terminate()
                self._process.wait(_STOP_TIMEOUT)
        finally:
            self._process.kill()
            self._process.wait()
            processes.kill_session(self._process.pid)


@contextlib.contextmanager
def vllm_server(arguments: Sequence[str], log: Path, *, wait: bool = True) -> Iterator[VllmServer]:
    """Run `vllm serve`; nothing of it is left when the block is.

    Args:
        arguments: what follows `vllm serve`: the model first.
        log: file for what it writes.
        wait: whether entering the block waits until it answers; else `wait_ready` does.

    """
    server = VllmServer(arguments, log)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        server.stop()
