"""Makes the measurements: round by round, all contenders in each, so that the machine's noise hits all alike."""

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
from bench.processes import BenchError, Caller, Running, Server
from bench.results import Health, Measured, Results, server_us, this_machine
from tokenwire._bench.recording import percentile

_WARM_UP_TOKENS = 24
_WARM_UP_SEED = 1_000
_HEALTH_INTERVAL = 0.02
_HEALTH_OF = (contenders.MULTIPLEX, contenders.STREAM, contenders.SMG, contenders.HTTP)


def run(plan: Plan, model: str, logs: Path) -> Results:
    """Measure everything in the plan."""
    results = Results(machine=this_machine(), plan=plan)
    started = time.monotonic()
    for step_ms in sorted({case.step_ms for case in plan.cases}):
        _say(f"{step_ms:g} ms steps: starting three servers and an engine")
        with Running(model, step_ms, logs) as running:
            for name, failure in running.failures.items():
                _fail(results, name, failure)
            cases = [case for case in plan.cases if case.step_ms == step_ms]
            for case in cases:
                _measure(results, case, running.callers)
            if step_ms == min(case.step_ms for case in plan.cases):
                _measure_extras(results, cases, running)
    results.seconds = time.monotonic() - started
    return results


def _measure(results: Results, case: Case, callers: dict[str, Caller]) -> None:
    names = [name for name in callers if CONTENDERS[name].takes(case)]
    for name in list(names):
        with _noting(results, name):
            callers[name].run(msgspec.structs.replace(case, output_tokens=_WARM_UP_TOKENS), _WARM_UP_SEED)
    for number in range(results.plan.rounds):
        # Each round begins with another contender.
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            with _noting(results, name):
                sample = callers[name].run(case, number)
                results.samples.append(Measured(case=case, contender=name, round=number, sample=sample))
                _say(f"{case.name}, round {number + 1}: {CONTENDERS[name].label}: {server_us(sample):.1f} µs/token")


def _measure_extras(results: Results, cases: list[Case], running: Running) -> None:
    largest = max((case for case in cases if not case.unary), key=lambda case: case.concurrency)
    for name in _HEALTH_OF:
        if name in running.callers:
            with _noting(results, name):
                server = running.servers[CONTENDERS[name].server or ""]
                results.health.append(_health(largest, name, running.callers[name], server))
    if contenders.STREAM in running.callers:
        _say(f"{results.plan.cancelled_streams:,} cancelled streams")
        with _noting(results, contenders.STREAM):
            results.memory = running.callers[contenders.STREAM].cancel(results.plan.cancelled_streams)


def _health(case: Case, name: str, caller: Caller, server: Server) -> Health:
    """Ask for the server's health while it works on a case."""
    times: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with contextlib.ExitStack() as stack:
            check = server.health_check(stack)
            check()
            while not over.wait(_HEALTH_INTERVAL):
                before = time.perf_counter()
                if check():
                    times.append(time.perf_counter() - before)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        caller.run(case, _WARM_UP_SEED)
    finally:
        over.set()
        thread.join()
    if not times:
        raise BenchError("its health gave no answer under load")
    times.sort()
    return Health(
        case=case,
        contender=name,
        answers=len(times),
        p50_ms=percentile(times, 0.50) * 1e3,
        p99_ms=percentile(times, 0.99) * 1e3,
    )


@contextlib.contextmanager
def _noting(results: Results, name: str) -> Iterator[None]:
    """Note a contender's failure and go on with the others."""
    try:
        yield
    except BenchError as error:
        _fail(results, name, str(error))


def _fail(results: Results, name: str, failure: str) -> None:
    _say(f"{CONTENDERS[name].label} failed: {failure}")
    results.failures.setdefault(name, failure)


def _say(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()
