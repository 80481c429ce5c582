"""The server's process: how it ends, what it says when it cannot start, and that it leaves nothing behind."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from harness import COMMAND, Finished, ServerProcess, run
from tokenwire import AsyncClient, FinishReason, Reason, SamplingParams, StatusError, UnavailableError, UnreachableError

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


async def test_sigint_ends_an_idle_server(arguments: list[str], prompt: list[int]) -> None:
    with ServerProcess(arguments, ready_timeout=250) as server:
        engines = server.engine_pids()
        assert engines
        async with AsyncClient(server.address) as client:
            await client.generate(prompt, SamplingParams(max_tokens=1))
            started = time.monotonic()
            server.send(signal.SIGINT)
            assert await asyncio.to_thread(server.wait) == 0
            assert server.leftovers == []
            # Below the drain's 30 s: there was nothing to wait for.
            assert time.monotonic() - started < 30
            with pytest.raises(UnreachableError):
                await client.engine_info(timeout=10)


def test_a_killed_server_takes_its_engine_with_it(arguments: list[str]) -> None:
    with ServerProcess(arguments, ready_timeout=250) as server:
        # The engine's own process, and the worker that it has started.
        assert len(server.engine_pids()) >= 2
        server.send(signal.SIGKILL)
        # The worker ends by itself when it finds the engine's process gone, which takes it seconds.
        assert server.wait(leftovers_timeout=60) == -signal.SIGKILL
        assert server.leftovers == []


def test_a_signal_while_loading_ends_the_load(arguments: list[str]) -> None:
    with ServerProcess(arguments, wait=False) as server:
        deadline = time.monotonic() + 60
        while "loading" not in server.stderr:
            assert time.monotonic() < deadline, server.log
            time.sleep(0.05)
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.log
        assert server.leftovers == []
        assert "stopping while loading" in server.stderr
        assert "tokenwire: serving" not in server.stdout
        assert "Traceback" not in server.stderr


def serve(*arguments: str) -> Finished:
    return run([COMMAND, "serve", *arguments], timeout=250)


def assert_one_line(finished: Finished, exit_code: int, *parts: str) -> None:
    assert finished.exit_code == exit_code, finished.stderr
    lines = [line for line in finished.stderr.splitlines() if line.startswith("tokenwire")]
    assert len(lines) == 1, finished.stderr
    assert all(part in lines[0] for part in parts), lines[0]
    assert "Traceback" not in finished.stderr
    assert "tokenwire: serving" not in finished.stdout


def test_a_taken_port(server: ServerProcess, arguments: list[str]) -> None:
    finished = serve(*arguments, "--port", server.address.rpartition(":")[2])
    assert_one_line(finished, 3, "cannot listen", server.address)


@pytest.mark.parametrize("missing", ["/no/such/model", "no-such-owner/no-such-model"])
def test_a_missing_model(missing: str) -> None:
    assert_one_line(serve(missing, "--port", "0"), 3, "cannot load", missing)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]}))
    assert_one_line(serve(str(tmp_path), "--port", "0"), 3, "cannot load", "NoSuchModel")


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--port", "65536"]], ids=" ".join)
def test_a_bad_flag(model: str, flags: list[str]) -> None:
    assert_one_line(serve(model, *flags), 2, flags[0])


def test_the_demo_answers() -> None:
    finished = run([sys.executable, DEMO], timeout=250)
    assert finished.exit_code == 0, finished.stderr
    assert "27 member states" in finished.stdout
    assert finished.stdout.rstrip().endswith("stopping the server")
