"""The tables of the report, as rows of cells, and their Markdown and plain-text form."""

from collections.abc import Sequence

from bench.cases import Case
from bench.contenders import CONTENDERS, IN_PROCESS, SMG
from bench.goals import goals
from bench.measure import MemoryGrowth
from bench.results import Figure, Results, caller_us, server_us, throughput

Table = list[list[str]]
"""Rows of cells; the first row is the header."""

LATENCIES: Sequence[Figure] = (
    lambda sample: sample.first_token_p50_ms,
    lambda sample: sample.first_token_p99_ms,
    lambda sample: sample.inter_token_p50_ms,
    lambda sample: sample.inter_token_p99_ms,
)
"""Figures of the latency columns, in milliseconds."""

_MIB = 1024 * 1024


def case_table(results: Results, case: Case) -> Table:
    """Return the figures of all contenders in a case."""
    unit = "µs/request" if case.unary else "µs/token"
    header = ["", f"server {unit}", "/ smg", "/ in-process", f"caller {unit}", "/ smg"]
    if not case.unary:
        header += ["first token p50", "p99", "inter-token p50", "p99"]
    rows = [[*header, "tokens/s"]]
    for name, entry in CONTENDERS.items():
        if not results.of(case, name):
            continue
        has_no_caller = name == IN_PROCESS
        row = [
            entry.label,
            _cpu(results, case, name, server_us),
            number(results.ratio(case, name, SMG, server_us), 2),
            number(results.ratio(case, name, IN_PROCESS, server_us), 2),
            "-" if has_no_caller else _cpu(results, case, name, caller_us),
            "-" if has_no_caller else number(results.ratio(case, name, SMG, caller_us), 2),
        ]
        if not case.unary:
            row += [_latency(results, case, name, figure) for figure in LATENCIES]
        rows.append([*row, number(results.median(case, name, throughput), 0)])
    return rows


def _cpu(results: Results, case: Case, name: str, figure: Figure) -> str:
    value = results.median(case, name, figure)
    if value is None:
        return "-"
    return f"{value * case.output_tokens:,.0f}" if case.unary else f"{value:.1f}"


def _latency(results: Results, case: Case, name: str, figure: Figure) -> str:
    value, floor = results.median(case, name, figure), results.median(case, IN_PROCESS, figure)
    if value is None:
        return "-"
    return f"{value:.1f}" if floor is None or name == IN_PROCESS else f"{value:.1f} ({value - floor:+.1f})"


def goal_table(results: Results) -> Table:
    """Return the goals with their measured values."""
    rows = [["Figure", "goal: at most", "measured", ""]]
    for goal in goals(results):
        verdict = "not measured" if goal.measured is None else "met" if goal.is_met else "**missed**"
        digits = 0 if goal.unit else 2
        rows.append(
            [
                goal.figure,
                f"{goal.at_most:.{digits}f}{goal.unit}",
                f"{number(goal.measured, digits + bool(goal.unit))}{goal.unit}",
                verdict,
            ]
        )
    return rows


def health_table(results: Results) -> Table:
    """Return the latency of health checks under load."""
    rows = [["Under the load of", "answers", "p50 ms", "p99 ms"]]
    for health in results.health:
        label = f"{CONTENDERS[health.contender].label}, {health.case.name}"
        rows.append([label, str(health.answers), number(health.p50_ms), number(health.p99_ms)])
    return rows


def memory_table(memory: MemoryGrowth) -> Table:
    """Return the memory while streams are cancelled."""
    return [
        ["MiB, GenerateStream", "before", *(f"{memory.streams * part // 4:,} cancelled" for part in range(1, 5))],
        ["server", *(number(size / _MIB) for size in memory.server)],
        ["client", *(number(size / _MIB) for size in memory.caller)],
    ]


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with a fixed number of decimals; "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    rule = "| --- |" + " ---: |" * (len(table[0]) - 1)
    return "\n".join([lines[0], rule, *lines[1:]])


def plain(table: Table) -> str:
    """Return a table as plain text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.replace("**", "").rjust(width) if column else cell.replace("**", "").ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )
