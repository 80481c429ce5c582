"""Says what the numbers say: a table for the terminal, and docs/performance.md."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import contenders
from bench.cases import Case
from bench.contenders import CONTENDERS, IN_PROCESS, SMG
from bench.measure import Memory
from bench.results import Figure, Results, caller_us, server_us, throughput

_MIB = 1024 * 1024
_FLAT_MIB = 2.0
"""Growth in the second half that still counts as flat: the allocator's, not the streams'."""


class Goal(NamedTuple):
    """A goal of the project, and what was measured for it."""

    figure: str
    at_most: float
    measured: float | None
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.measured is not None and self.measured <= self.at_most


def goals(results: Results) -> list[Goal]:
    """Give the goals, at the shortest step time, where the front ends are the limit."""
    cases = results.plan.cases
    fastest = min(case.step_ms for case in cases)
    load = [case for case in cases if case.step_ms == fastest and not case.unary and case.logprobs is None]
    largest = max(load, key=lambda case: case.concurrency)
    logprobs = next(case for case in cases if case.logprobs is not None)
    long_prompt = next(case for case in cases if case.unary)
    at = f"{largest.concurrency} concurrent"

    def ratio(contender: str, reference: str, figure: Figure, case: Case = largest) -> float | None:
        return results.ratio(case, contender, reference, figure)

    def inter_token_p99(sample: object) -> float | None:
        value: float | None = getattr(sample, "inter_token_p99_ms", None)
        return value

    multiplex, typed, stream = contenders.MULTIPLEX, contenders.TYPED, contenders.STREAM
    found = [
        Goal(f"Multiplex, server CPU per token / smg stream, {at}", 0.18, ratio(multiplex, SMG, server_us)),
        Goal(
            f"Multiplex, server CPU per token / in-process generate, {at}",
            0.60,
            ratio(multiplex, IN_PROCESS, server_us),
        ),
        Goal(f"Multiplex, step view, caller CPU per token / smg caller, {at}", 0.12, ratio(multiplex, SMG, caller_us)),
        Goal(f"Multiplex, typed streams, caller CPU per token / smg caller, {at}", 0.18, ratio(typed, SMG, caller_us)),
        Goal(f"GenerateStream, server CPU per token / smg stream, {at}", 0.65, ratio(stream, SMG, server_us)),
        Goal(
            f"Generate, {long_prompt.prompt_tokens:,}-token prompts, server CPU / smg",
            0.80,
            ratio(contenders.UNARY, SMG, server_us, long_prompt),
        ),
        Goal(
            f"Multiplex, logprobs={logprobs.logprobs}, server CPU per token / smg stream, "
            f"{logprobs.concurrency} concurrent",
            0.22,
            ratio(multiplex, SMG, server_us, logprobs),
        ),
        Goal(f"Multiplex, inter-token p99 / smg, {at}", 1.0, ratio(multiplex, SMG, inter_token_p99)),
    ]
    if (memory := results.memory) is not None:
        grown = max(sizes[4] - sizes[2] for sizes in (memory.server, memory.caller))
        found.append(
            Goal(
                f"Memory growth of server or client in the second half of {memory.streams:,} cancelled streams",
                _FLAT_MIB,
                grown / _MIB,
                " MiB",
            )
        )
    return found


def terminal(results: Results) -> str:
    """Give the tables as text for the terminal."""
    parts = []
    for case in results.plan.cases:
        parts += [case.name, _plain(_case_table(results, case)), ""]
    return "\n".join([*parts, "Goals", _plain(_goal_table(results)), ""])


def write(results: Results, path: Path) -> None:
    """Write docs/performance.md."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(_page(results), encoding="utf-8")


def _page(results: Results) -> str:
    sections = [
        "# Performance",
        _INTRODUCTION,
        "## Goals",
        _markdown(_goal_table(results)),
        "## Where tokenwire falls short",
        _bullets(_shortcomings(results)),
        "## Cost against concurrency",
        "![CPU time per token against concurrency](img/cpu-per-token.svg)",
        "![Time between tokens](img/inter-token.svg)",
        "## All figures",
        _LEGEND,
    ]
    for case in results.plan.cases:
        sections += [f"### {case.name[0].upper()}{case.name[1:]}", _markdown(_case_table(results, case))]
    if results.health:
        sections += ["## Health under load", _markdown(_health_table(results))]
    if results.memory is not None:
        sections += ["## Memory", _memory(results.memory)]
    if results.failures:
        sections += ["## Not measured", _bullets(f"{CONTENDERS[k].label}: {v}" for k, v in results.failures.items())]
    sections += [
        "## Method",
        _METHOD.format(rounds=results.plan.rounds),
        "## How to repeat",
        "```\nmake bench            # everything, and this page\nmake bench QUICK=1    # a look in two minutes\n```",
        _origin(results),
    ]
    return "\n\n".join(sections) + "\n"


def _origin(results: Results) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"This page: {machine.date}, {machine.cpus} CPUs ({machine.processor}), Python {machine.python}, {versions}; "
        f"the run took {results.seconds / 60:.0f} minutes."
    )


_INTRODUCTION = """\
Written by `make bench`; do not edit. What it costs to drive vLLM from outside, per token: CPU time of the server's
process and of the caller's, and the latency that the way adds. Every contender drives the same engine on the same
simulated device, in one run; ratios within the run hold, absolute times depend on the machine."""

_LEGEND = """\
CPU time is in µs for each output token, or for each request of a unary case; latency in ms. A ratio is the median of
those within the rounds. *First token* and *inter-token* are what the caller sees; in brackets, what is added to the
in-process engine. An inter-token p50 below the step time means that tokens come in bursts."""

_METHOD = """\
- **The device.** vLLM's real AsyncLLM, EngineCore and scheduler, with a simulated device in place of workers: a step
  takes the stated time, and the next token is a formula of the prompt. Each caller checks every token of every request
  against that formula.
- **The engine** has the same arguments for all: `max_num_seqs` 256, `max_num_batched_tokens` 8192, no prefix caching
  (several contenders share a server), vLLM's statistics on, as is its default.
- **The load.** All requests of a case start at once and run to their end; prompts are random, the same for all.
- **Contenders.** *tokenwire* by its Python client. *smg-grpc-servicer* in its default Python implementation behind
  vLLM's own gRPC launcher, by a raw stub. *HTTP* is vLLM's API server with `--tokens-only`, as server-sent events, by
  aiohttp with msgspec. *In-process* is `AsyncLLM.generate` in one process on uvloop, all requests merged to one queue;
  it has no caller of its own.
- **CPU time** is the operating system's, from the process's own clock: of the server's process without the engine's,
  and of a caller that is a process of its own for each contender. Both include what happens before the first token and
  up to 50 ms after the last.
- **Latency.** *First token*: from the start of the case to a request's first token. *Inter-token*: between messages that
  follow each other in a request; one with several tokens counts once, so waiting for it shows.
- **Figures** are medians over the rounds ({rounds}), after a warm-up. In each round all contenders take their turn, each
  time another one first, so that the machine's noise hits all alike."""


def _case_table(results: Results, case: Case) -> list[list[str]]:
    unit = "µs/request" if case.unary else "µs/token"
    header = ["", f"server {unit}", "/ smg", "/ in-process", f"caller {unit}", "/ smg"]
    if not case.unary:
        header += ["first token p50", "p99", "inter-token p50", "p99"]
    rows = [[*header, "tokens/s"]]
    for name, entry in CONTENDERS.items():
        if not results.of(case, name):
            continue
        own = name == IN_PROCESS
        row = [
            entry.label,
            _cpu(results, case, name, server_us),
            _number(results.ratio(case, name, SMG, server_us), 2),
            _number(results.ratio(case, name, IN_PROCESS, server_us), 2),
            "-" if own else _cpu(results, case, name, caller_us),
            "-" if own else _number(results.ratio(case, name, SMG, caller_us), 2),
        ]
        if not case.unary:
            row += [_latency(results, case, name, figure) for figure in _LATENCIES]
        rows.append([*row, _number(results.median(case, name, throughput), 0)])
    return rows


def _cpu(results: Results, case: Case, name: str, figure: Figure) -> str:
    value = results.median(case, name, figure)
    if value is None:
        return "-"
    return f"{value * case.output_tokens:,.0f}" if case.unary else f"{value:.1f}"


_LATENCIES: Sequence[Figure] = (
    lambda sample: sample.first_token_p50_ms,
    lambda sample: sample.first_token_p99_ms,
    lambda sample: sample.inter_token_p50_ms,
    lambda sample: sample.inter_token_p99_ms,
)


def _latency(results: Results, case: Case, name: str, figure: Figure) -> str:
    value, floor = results.median(case, name, figure), results.median(case, IN_PROCESS, figure)
    if value is None:
        return "-"
    return f"{value:.1f}" if floor is None or name == IN_PROCESS else f"{value:.1f} ({value - floor:+.1f})"


def _goal_table(results: Results) -> list[list[str]]:
    rows = [["Figure", "goal: at most", "measured", ""]]
    for goal in goals(results):
        verdict = "not measured" if goal.measured is None else "met" if goal.is_met else "**short**"
        digits = 0 if goal.unit else 2
        rows.append(
            [
                goal.figure,
                f"{goal.at_most:.{digits}f}{goal.unit}",
                f"{_number(goal.measured, digits + bool(goal.unit))}{goal.unit}",
                verdict,
            ]
        )
    return rows


def _shortcomings(results: Results) -> list[str]:
    """Find where a goal was missed, and where another server does better than tokenwire's RPC of the kind."""
    found = [
        f"Goal missed: {goal.figure} is {_number(goal.measured, 2)}{goal.unit}, above {goal.at_most:g}{goal.unit}."
        for goal in goals(results)
        if goal.measured is not None and not goal.is_met
    ]
    for ours, names in _OURS.items():
        for text, figure in _COMPARED.items():
            behind = [line for case in results.plan.cases if (line := _behind(results, case, names, figure))]
            if behind:
                found.append(f"{ours}, {text}: {'; '.join(behind)}.")
    return found or ["Nowhere in this run: all goals are met, and no other server is ahead in any figure by 5 %."]


_NOISE = 1.05

_OURS = {
    "Multiplex": [contenders.MULTIPLEX, contenders.TYPED],
    "GenerateStream": [contenders.STREAM],
    "Generate, unary cases": [contenders.UNARY],
}

# Not the median between tokens: of a stream that comes in bursts it is small.
_COMPARED: dict[str, Figure] = {
    "server CPU in µs for a token": server_us,
    "caller CPU in µs for a token": caller_us,
    "median ms to the first token": _LATENCIES[0],
    "p99 of the ms to the first token": _LATENCIES[1],
    "p99 of the ms between tokens": _LATENCIES[3],
}


def _behind(results: Results, case: Case, names: list[str], figure: Figure) -> str | None:
    """Say by how much tokenwire is behind the best other server in a case, if it is."""
    if case.unary != CONTENDERS[names[0]].unary:
        return None
    best, other = (_best(results, case, group, figure) for group in (names, (SMG, contenders.HTTP)))
    if best is None or other is None or best[0] <= other[0] * _NOISE:
        return None
    return f"{best[0]:.1f} against {other[0]:.1f} of {CONTENDERS[other[1]].label} ({case.name})"


def _best(results: Results, case: Case, names: Iterable[str], figure: Figure) -> tuple[float, str] | None:
    values = [(value, name) for name in names if (value := results.median(case, name, figure)) is not None]
    return min(values, default=None)


def _health_table(results: Results) -> list[list[str]]:
    rows = [["Under the load of", "answers", "p50 ms", "p99 ms"]]
    for health in results.health:
        label = f"{CONTENDERS[health.contender].label}, {health.case.name}"
        rows.append([label, str(health.answers), _number(health.p50_ms), _number(health.p99_ms)])
    return rows


def _memory(memory: Memory) -> str:
    rows = [
        ["MiB, GenerateStream", "before", *(f"{memory.streams * part // 4:,} cancelled" for part in range(1, 5))],
        ["server", *(_number(size / _MIB) for size in memory.server)],
        ["client", *(_number(size / _MIB) for size in memory.caller)],
    ]
    return _markdown(rows)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    rule = "| --- |" + " ---: |" * (len(rows[0]) - 1)
    return "\n".join([lines[0], rule, *lines[1:]])


def _plain(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.replace("**", "").ljust(width) if not number else cell.replace("**", "").rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
