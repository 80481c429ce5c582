"""Ask a real model a question through gRPC: what `make demo` runs.

Starts `tokenwire serve` with the demo model on the CPU engine, tokenizes the prompt on the client side, streams the
output token ids, detokenizes them, and stops the server.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tokenwire
from tokenwire_server.demo_model import DemoModelError, ensure_demo_model

QUESTION = "How many countries are in the European Union?"

# For one question, 256 MB of KV cache are enough, and torch.compile is not worth the minute that it takes.
ENGINE_OPTIONS = [
    *("--max-model-len", "2048"),
    *("--kv-cache-memory-bytes", "268435456"),
    *("--gpu-memory-utilization", "0.2"),
    "--enforce-eager",
]
# vLLM neither contacts the Hugging Face Hub nor reports usage statistics.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

STOP_TIMEOUT = 30
"""Seconds for the server to shut down before it is killed."""
LOG_LINES_SHOWN = 40


class DemoError(Exception):
    """The demo failed. The message is one line."""


def log_progress(text: str) -> None:
    """Print a line of progress."""
    print(f"demo: {text}", flush=True)


def free_port() -> int:
    """Return a TCP port that is currently free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `tokenwire serve` inside this block; the server and its engine process end with the block in every case.

    Args:
        model: the model folder.
        port: TCP port on 127.0.0.1.
        log: file for the server's output.

    Yields:
        The server process.

    """
    command: list[str | Path] = [Path(sys.executable).with_name("tokenwire"), "serve", model, "--port", str(port)]
    with log.open("wb") as output:
        # In its own session, so that Ctrl-C does not reach it: the demo shuts it down.
        server = subprocess.Popen(
            [*command, *ENGINE_OPTIONS],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    try:
        yield server
    finally:
        log_progress("stopping the server")
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT)
        finally:
            # Kill what remains: it hangs, or Ctrl-C was pressed a second time.
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


async def wait_ready(client: tokenwire.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server is ready.

    Raises:
        DemoError: the server exited.

    """
    ready = asyncio.create_task(client.wait_ready())
    exited = asyncio.create_task(_wait_for_exit(server))
    try:
        await asyncio.wait({ready, exited}, return_when=asyncio.FIRST_COMPLETED)
        if exited.done():
            raise DemoError(f"the server exited with code {server.returncode}")
        await ready
    finally:
        ready.cancel()
        exited.cancel()


async def _wait_for_exit(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:  # noqa: ASYNC110  # Popen has no event for it
        await asyncio.sleep(0.2)


def load_tokenizer(model: Path) -> Any:
    """Return the tokenizer in a model folder; the import alone takes seconds."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(model)


async def ask(model: Path, port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait for the server, send the question and print the answer.

    Args:
        model: the model folder, which contains the tokenizer.
        port: TCP port of the server.
        server: the server process.

    """
    async with tokenwire.AsyncClient(f"127.0.0.1:{port}") as client:
        started = time.monotonic()
        log_progress("starting vLLM with the model on the CPU (15 to 30 seconds)")
        # Meanwhile the engine starts.
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        await wait_ready(client, server)
        log_progress(f"ready after {time.monotonic() - started:.0f} seconds")

        messages = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        log_progress(f"question: {QUESTION}")
        log_progress(f"sending {len(prompt)} token ids: {prompt}")

        answer: list[int] = []
        started = time.monotonic()
        async with client.stream(prompt, tokenwire.SamplingParams(temperature=0.0, max_tokens=128)) as deltas:
            async for delta in deltas:
                answer += delta.token_ids
                print(*delta.token_ids, end=" ", flush=True)
        print()
        seconds = time.monotonic() - started
        log_progress(f"received {len(answer)} token ids in {seconds:.1f} s, streamed")
        log_progress(f"answer: {tokenizer.decode(answer, skip_special_tokens=True)}")


def demo(log: Path) -> None:
    """Run the demo; `log` receives the output of the server."""
    model = ensure_demo_model(progress=log_progress)
    port = free_port()
    with running_server(model, port, log) as server:
        asyncio.run(ask(model, port, server))


def main() -> int:
    """Run the demo and return its exit code."""
    # As for Ctrl-C: the server must also end when the demo is killed or its terminal is closed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    descriptor, name = tempfile.mkstemp(prefix="tokenwire-demo-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    try:
        demo(log)
    except (DemoError, DemoModelError, tokenwire.TokenwireError) as error:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        print(*lines, sep="\n", file=sys.stderr)
        print(f"demo: error: {error}; the complete server log is in {log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        log.unlink()
        return 130
    log.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
