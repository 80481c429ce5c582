"""Where tokenwire falls short: missed goals, and figures in which another server is better."""

from collections.abc import Iterable

from bench import contenders
from bench.cases import Case
from bench.contenders import CONTENDERS, SMG
from bench.goals import goals
from bench.results import Figure, Results, caller_us, server_us
from bench.tables import LATENCIES, number

_NOISE = 1.05
"""Ratio up to which two figures count as equal."""

_OURS = {
    "Multiplex": [contenders.MULTIPLEX, contenders.TYPED],
    "GenerateStream": [contenders.STREAM],
    "Generate, unary cases": [contenders.UNARY],
}
"""Contenders per RPC; the best of them is compared."""

# Without the inter-token median, which is small for a stream that arrives in bursts.
_COMPARED: dict[str, Figure] = {
    "server CPU in µs per token": server_us,
    "caller CPU in µs per token": caller_us,
    "median time to first token in ms": LATENCIES[0],
    "p99 time to first token in ms": LATENCIES[1],
    "p99 inter-token time in ms": LATENCIES[3],
}


def shortcomings(results: Results) -> list[str]:
    """Return a sentence per missed goal, and per figure in which another server is better than the equivalent RPC."""
    sentences = [
        f"Goal missed: {goal.figure} is {number(goal.measured, 2)}{goal.unit}, above {goal.at_most:g}{goal.unit}."
        for goal in goals(results)
        if goal.measured is not None and not goal.is_met
    ]
    for ours, names in _OURS.items():
        for text, figure in _COMPARED.items():
            behind = [line for case in results.plan.cases if (line := _behind(results, case, names, figure))]
            if behind:
                sentences.append(f"{ours}, {text}: {'; '.join(behind)}.")
    return sentences or [
        "Nowhere in this run: all goals are met, and no other server is ahead by more than 5 % in any figure."
    ]


def _behind(results: Results, case: Case, names: list[str], figure: Figure) -> str | None:
    """Return by how much tokenwire is behind the best other server in a case; None if it is not."""
    if case.unary != CONTENDERS[names[0]].unary:
        return None
    best, other = (_best(results, case, group, figure) for group in (names, (SMG, contenders.HTTP)))
    if best is None or other is None or best[0] <= other[0] * _NOISE:
        return None
    return f"{best[0]:.1f} against {other[0]:.1f} of {CONTENDERS[other[1]].label} ({case.name})"


def _best(results: Results, case: Case, names: Iterable[str], figure: Figure) -> tuple[float, str] | None:
    values = [(value, name) for name in names if (value := results.median(case, name, figure)) is not None]
    return min(values, default=None)
