"""The server's process: how it ends, what it says when it cannot start, and that it leaves nothing behind."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

from harness import COMMAND, Finished, ServerProcess, run
from tokenwire import AsyncClient, FinishReason, Reason, SamplingParams, StatusError, UnavailableError

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1900)
DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"


async def stop_is_under_way(client: AsyncClient, prompt: list[int]) -> StatusError:
    """Ask until the server refuses, and return the refusal."""
    while True:
        try:
            await client.generate(prompt, SamplingParams(max_tokens=1))
        except UnavailableError as error:
            return error


async def test_sigterm_drains_and_a_second_one_ends_what_runs(arguments: list[str], prompt: list[int]) -> None:
    with ServerProcess(arguments, ready_timeout=250) as server:
        async with AsyncClient(server.address) as client:
            call = asyncio.create_task(client.generate(prompt, ENDLESS))
            async with client.stream(prompt, ENDLESS) as stream:
                tokens = list((await anext(stream)).token_ids)
                server.send(signal.SIGTERM)
                refusal = await stop_is_under_way(client, prompt)
                assert refusal.reason == Reason.DRAINING
                # What runs goes on.
                tokens += (await anext(stream)).token_ids
                assert not call.done()
                server.send(signal.SIGTERM)
                deltas = [delta async for delta in stream]
            result = await call
        assert deltas[-1].finish_reason is FinishReason.ABORT
        assert deltas[-1].usage is not None
        assert result.finish_reason is FinishReason.ABORT
        assert result.token_ids
        assert await asyncio.to_thread(server.wait) == 0
        assert server.leftovers == []


def test_a_killed_server_takes_its_engine_with_it(arguments: list[str]) -> None:
    with ServerProcess(arguments, ready_timeout=250) as server:
        # The engine's own process, and the worker that it has started.
        assert len(server.engine_pids()) >= 2
        server.send(signal.SIGKILL)
        # The worker ends by itself when it finds the engine's process gone, which takes it seconds.
        assert server.wait(leftovers_timeout=60) == -signal.SIGKILL
        assert server.leftovers == []


def serve(*arguments: str) -> Finished:
    return run([COMMAND, "serve", *arguments], timeout=250)


def assert_one_line(finished: Finished, exit_code: int, *parts: str) -> None:
    assert finished.exit_code == exit_code, finished.stderr
    lines = [line for line in finished.stderr.splitlines() if line.startswith("tokenwire")]
    assert len(lines) == 1, finished.stderr
    assert all(part in lines[0] for part in parts), lines[0]
    assert "Traceback" not in finished.stderr
    assert "tokenwire: serving" not in finished.stdout


def test_a_taken_port(arguments: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_line(serve(*arguments, "--port", str(port)), 3, "cannot listen", f"127.0.0.1:{port}")


def test_a_missing_model() -> None:
    missing = "no-such-owner/no-such-model"
    assert_one_line(serve(missing, "--port", "0"), 3, "cannot load", missing)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]}))
    assert_one_line(serve(str(tmp_path), "--port", "0"), 3, "cannot load", "NoSuchModel")


def test_a_bad_flag(model: str) -> None:
    """What else can be wrong with the command line is in tests/server/test_arguments.py."""
    assert_one_line(serve(model, "--no-such-flag"), 2, "--no-such-flag")


def test_the_demo_answers() -> None:
    finished = run([sys.executable, DEMO], timeout=250)
    assert finished.exit_code == 0, finished.stderr
    assert "27 member states" in finished.stdout
    assert finished.stdout.rstrip().endswith("stopping the server")
