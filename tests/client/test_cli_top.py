"""`tokenwire top` against servers with a scripted load."""

import json
import signal
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from harness import COMMAND
from harness.terminal import Terminal
from tokenwire._cli.app import app
from tokenwire.v1 import engine_load_pb2
from tokenwire.v1 import engine_service_pb2 as pb


class Servicer:
    """Each refresh finds 50 more generated tokens, and 200 more prompt tokens, half of them cached."""

    def __init__(self) -> None:
        self.looks = 0
        self.ranks = 1
        self.fails_after: int | None = None
        self.restarts_after: int | None = None

    def get_load(self, _request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        self.looks += 1
        if self.fails_after is not None and self.looks > self.fails_after:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the engine\nhas died")
        if self.looks == self.restarts_after:
            self.looks = 0
        load = engine_load_pb2.EngineLoad(num_live_requests=5)
        for rank in range(self.ranks):
            load.ranks.add(
                data_parallel_rank=rank,
                num_running_reqs=3,
                num_waiting_reqs=2,
                kv_cache_usage=0.25,
                generation_tokens=50 * self.looks,
                prompt_tokens=200 * self.looks,
                prefix_cache_queries=200 * self.looks,
                prefix_cache_hits=100 * self.looks,
                num_preemptions=1,
            )
        return pb.GetLoadResponse(load=load)


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def target(servicer: Servicer, serve_threads: Callable[..., str]) -> str:
    return serve_threads(GetLoad=servicer.get_load)


def top(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", "--interval", "0.1", *arguments])


def test_lines_of_json(target: str) -> None:
    done = top(target, "--json", "--count", "3")
    assert done.exit_code == 0
    first, second, third = [json.loads(line) for line in done.stdout.splitlines()]
    known = {
        "server": target,
        "rank": 0,
        "num_live_requests": 5,
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "kv_cache_usage": 0.25,
        "num_preemptions": 1,
        "error": None,
    }
    assert first == known | {
        "generation_tokens_per_second": None,
        "prompt_tokens_per_second": None,
        "prefix_cache_hit_rate": None,
    }
    for look in (second, third):
        assert known.items() <= look.items()
        assert look["prefix_cache_hit_rate"] == 0.5
        assert look["generation_tokens_per_second"] > 0
        assert look["prompt_tokens_per_second"] == pytest.approx(4 * look["generation_tokens_per_second"])


def test_plain_lines_have_one_header(servicer: Servicer, target: str) -> None:
    servicer.ranks = 2
    done = top("--target", target, "--count", "2")
    header, *lines = done.stdout.splitlines()
    assert header.split()[:5] == ["server", "rank", "live", "running", "waiting"]
    assert [line.split()[:5] for line in lines] == [[target, rank, "5", "3", "2"] for rank in ("0", "1", "0", "1")]
    assert [line.split()[7] for line in lines] == ["25.0%"] * 4
    assert {len(line) for line in lines} == {len(header)}


def test_a_server_that_goes_away_shows_its_error(
    servicer: Servicer, target: str, serve_threads: Callable[..., str]
) -> None:
    servicer.fails_after = 1
    other = serve_threads(GetLoad=Servicer().get_load)
    done = top(target, other, "--json", "--count", "2")
    assert done.exit_code == 0
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(look["server"], look["error"]) for look in looks] == [
        (target, None),
        (other, None),
        (target, f"cannot reach {target}: the engine has died"),
        (other, None),
    ]


def test_a_server_that_has_started_again_has_no_rate(servicer: Servicer, target: str) -> None:
    servicer.restarts_after = 3
    looks = [json.loads(line) for line in top(target, "--json", "--count", "4").stdout.splitlines()]
    rates = [look["generation_tokens_per_second"] is not None for look in looks]
    assert rates == [False, True, False, True]


def test_an_old_server_has_no_such_method(serve_threads: Callable[..., str]) -> None:
    done = top(serve_threads(), "--count", "1")
    assert done.exit_code == 1
    assert done.stderr.startswith("tokenwire: UNIMPLEMENTED")
    assert done.stderr.count("\n") == 1


def test_the_table_fits_into_80_columns(target: str) -> None:
    terminal = Terminal(COMMAND, "top", target, "--interval", "0.2", kind="xterm", columns=80)
    try:
        shown = terminal.until("50.0%")
    finally:
        terminal.close()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for word in ("server", "rank", "live", "running", "waiting", "tokens/s", "KV", "use", "cache", "hits", "preempted"):
        assert word in shown
    # The end of the address may be on a second line.
    assert target[:-2] in shown


def test_the_table_renews_itself_until_ctrl_c(servicer: Servicer, target: str) -> None:
    servicer.fails_after = 2
    terminal = Terminal(COMMAND, "top", target, "--interval", "0.2", kind="xterm")
    try:
        assert "tokens/s" in terminal.until("25.0%")
        terminal.until("50.0%")
        terminal.until("the engine has died")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
