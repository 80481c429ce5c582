"""`tokenwire bench` on a real server: its own process is found, and every token is counted."""

import json

import pytest

from harness import COMMAND, run
from harness.simulated import Simulated

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("mode", ["unary", "stream", "multiplex"])
def test_report(simulated: Simulated, mode: str) -> None:
    options = ["--mode", mode, "--requests", "16", "--concurrency", "8", "--output-tokens", "10", "--json", "-"]
    finished = run([COMMAND, "bench", simulated.address, *options])
    assert finished.exit_code == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["requests_completed"] == 16
    assert report["output_tokens"] == 160
    assert report["server"]["pid"] == simulated.server.pid
    assert report["server"]["cpu_us_per_token"] > 0
    # A request's ten tokens take ten steps of the device.
    assert report["end_to_end_ms"]["p50"] >= 50
