"""Runs the measurements in rounds with all contenders each, so that noise of the machine affects all of them."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench import contenders
from bench.cases import Case, Plan
from bench.contenders import CONTENDERS
from bench.deployment import Deployment
from bench.processes import BenchError, Caller, Server
from bench.results import HealthLatency, Measurement, Results, server_us, this_machine
from tokenwire._bench.recording import percentile

_WARM_UP_TOKENS = 24
_WARM_UP_SEED = 1_000
_HEALTH_INTERVAL = 0.02
"""Seconds between health checks."""
_HEALTH_OF = (contenders.MULTIPLEX, contenders.STREAM, contenders.SMG, contenders.HTTP)
"""Contenders under whose load the health check of their server is measured."""


def run(plan: Plan, model: str, logs: Path) -> Results:
    """Run a plan.

    Args:
        plan: what to measure.
        model: the model folder.
        logs: folder for the output of servers and callers.

    Returns:
        The results; contenders that failed are in `failures`.

    """
    results = Results(machine=this_machine(), plan=plan)
    started = time.monotonic()
    for step_ms in sorted({case.step_ms for case in plan.cases}):
        _log(f"{step_ms:g} ms steps: starting three servers and an engine")
        with Deployment(model, step_ms, logs) as deployment:
            for name, failure in deployment.failures.items():
                _record_failure(results, name, failure)
            cases = [case for case in plan.cases if case.step_ms == step_ms]
            for case in cases:
                _measure(results, case, deployment.callers)
            if step_ms == min(case.step_ms for case in plan.cases):
                _measure_extras(results, cases, deployment)
    results.seconds = time.monotonic() - started
    return results


def _measure(results: Results, case: Case, callers: dict[str, Caller]) -> None:
    names = [name for name in callers if CONTENDERS[name].supports(case)]
    for name in list(names):
        with _recording_failures(results, name):
            callers[name].run(msgspec.structs.replace(case, output_tokens=_WARM_UP_TOKENS), _WARM_UP_SEED)
    for number in range(results.plan.rounds):
        # Each round starts with a different contender.
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            with _recording_failures(results, name):
                sample = callers[name].run(case, number)
                results.samples.append(Measurement(case=case, contender=name, round=number, sample=sample))
                _log(f"{case.name}, round {number + 1}: {CONTENDERS[name].label}: {server_us(sample):.1f} µs/token")


def _measure_extras(results: Results, cases: list[Case], deployment: Deployment) -> None:
    largest = max((case for case in cases if not case.unary), key=lambda case: case.concurrency)
    for name in _HEALTH_OF:
        if name in deployment.callers:
            with _recording_failures(results, name):
                server = deployment.servers[CONTENDERS[name].server or ""]
                results.health.append(_health_latency(largest, name, deployment.callers[name], server))
    if contenders.STREAM in deployment.callers:
        _log(f"{results.plan.cancelled_streams:,} cancelled streams")
        with _recording_failures(results, contenders.STREAM):
            results.memory = deployment.callers[contenders.STREAM].cancel(results.plan.cancelled_streams)


def _health_latency(case: Case, name: str, caller: Caller, server: Server) -> HealthLatency:
    """Measure the server's health check while a caller runs a case."""
    times: list[float] = []
    finished = threading.Event()

    def poll() -> None:
        with contextlib.ExitStack() as stack:
            check = server.health_check(stack)
            check()
            while not finished.wait(_HEALTH_INTERVAL):
                before = time.perf_counter()
                if check():
                    times.append(time.perf_counter() - before)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        caller.run(case, _WARM_UP_SEED)
    finally:
        finished.set()
        thread.join()
    if not times:
        raise BenchError("no health check succeeded under load")
    times.sort()
    return HealthLatency(
        case=case,
        contender=name,
        answers=len(times),
        p50_ms=percentile(times, 0.50) * 1e3,
        p99_ms=percentile(times, 0.99) * 1e3,
    )


@contextlib.contextmanager
def _recording_failures(results: Results, name: str) -> Iterator[None]:
    """Record the failure of a contender and continue with the others."""
    try:
        yield
    except BenchError as error:
        _record_failure(results, name, str(error))


def _record_failure(results: Results, name: str, failure: str) -> None:
    _log(f"{CONTENDERS[name].label} failed: {failure}")
    results.failures.setdefault(name, failure)


def _log(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()
