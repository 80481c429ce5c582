"""Ask a real model a question through gRPC: what `make demo` runs.

Starts `tokenwire serve` with the demo model on the CPU engine, makes the prompt's token ids on this side, streams the
answer's token ids, makes text of them, and stops the server.
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

# One question needs little: 256 MB of KV cache, and no minute of torch.compile before the first token.
ENGINE_OPTIONS = [
    *("--max-model-len", "2048"),
    *("--kv-cache-memory-bytes", "268435456"),
    *("--gpu-memory-utilization", "0.2"),
    "--enforce-eager",
]
# vLLM asks nobody for anything.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

STOP_TIMEOUT = 30
LOG_LINES_SHOWN = 40


class DemoError(Exception):
    """The demo cannot go on; the message is for a person."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"demo: {text}", flush=True)


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `tokenwire serve`; it and its engine process are gone when the block is left, however that happens."""
    command: list[str | Path] = [Path(sys.executable).with_name("tokenwire"), "serve", model, "--port", str(port)]
    with log.open("wb") as output:
        # In a session of its own, where Ctrl-C does not reach it: the demo stops it in order.
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
        say("stopping the server")
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT)
        finally:
            # What is left now hangs, or the person has pressed Ctrl-C once more.
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


async def wait_ready(client: tokenwire.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server takes requests; fail as soon as it has ended."""
    ready = asyncio.create_task(client.wait_ready())
    ended = asyncio.create_task(_ended(server))
    try:
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise DemoError(f"the server ended with exit code {server.returncode}")
        await ready
    finally:
        ready.cancel()
        ended.cancel()


async def _ended(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:  # noqa: ASYNC110  # a process tells nobody that it has ended
        await asyncio.sleep(0.2)


def load_tokenizer(model: Path) -> Any:
    """Return the tokenizer of a model's folder; the import alone takes seconds."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(model)


async def ask(model: Path, port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait for the server, ask the question and show the answer."""
    async with tokenwire.AsyncClient(f"127.0.0.1:{port}") as client:
        started = time.monotonic()
        say("starting vLLM with the model on the CPU (15 to 30 seconds)")
        # While the engine starts.
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        await wait_ready(client, server)
        say(f"ready after {time.monotonic() - started:.0f} seconds")

        messages = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        say(f"question: {QUESTION}")
        say(f"sending {len(prompt)} token ids: {prompt}")

        answer: list[int] = []
        started = time.monotonic()
        async with client.stream(prompt, tokenwire.SamplingParams(temperature=0.0, max_tokens=128)) as deltas:
            async for delta in deltas:
                answer += delta.token_ids
                print(*delta.token_ids, end=" ", flush=True)
        print()
        seconds = time.monotonic() - started
        say(f"received {len(answer)} token ids in {seconds:.1f} s, as they came")
        say(f"answer: {tokenizer.decode(answer, skip_special_tokens=True)}")


def demo(log: Path) -> None:
    """Run the demo; the server writes to `log`."""
    model = ensure_demo_model(progress=say)
    port = free_port()
    with running_server(model, port, log) as server:
        asyncio.run(ask(model, port, server))


def main() -> int:
    """Run the demo and return its exit code."""
    # A closed terminal or a `kill` must not leave the server behind either.
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
        print(f"demo: error: {error}; all of the server's log is in {log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        log.unlink()
        return 130
    log.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
