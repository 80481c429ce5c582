"""smg's gateway, a router that speaks to engines over `vllm.grpc.engine.VllmEngine`."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from harness import processes

_READY_TIMEOUT = 60.0
_POLL = 0.1
_COMMAND = Path(sys.executable).with_name("smg")


@contextlib.contextmanager
def smg_gateway(address: str, log: Path) -> Iterator[str]:
    """Run `smg launch` in front of a server, and give its URL; nothing of it is left when the block is.

    Args:
        address: the server's address, host and port.
        log: file for what the gateway writes.

    """
    port, metrics_port = _free_ports(2)
    host = "127.0.0.1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(_COMMAND, "launch", "--host", host, "--port", str(port), "--worker-urls", f"grpc://{address}"),
                *("--prometheus-host", host, "--prometheus-port", str(metrics_port)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=processes.environment(),
            start_new_session=True,
        )
    try:
        _wait_ready(f"http://{host}:{port}", process, log)
        yield f"http://{host}:{port}"
    finally:
        # It would wait for connections that its callers keep.
        process.kill()
        process.wait()
        processes.kill_session(process.pid)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the gateway has found its server; a test fails where it does not."""
    deadline = time.monotonic() + _READY_TIMEOUT
    with httpx.Client(base_url=url, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                response = client.get("/v1/models")
                if response.is_success and response.json()["data"]:
                    return
            late = time.monotonic() > deadline
            if late or process.poll() is not None:
                what = "is not ready" if late else "has ended"
                raise AssertionError(f"the gateway {what}\n{log.read_text(errors='replace')}")
            time.sleep(_POLL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
