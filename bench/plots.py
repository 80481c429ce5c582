"""The plots of docs/performance.md, as PNG and SVG."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.cases import Case
from bench.contenders import CONTENDERS, HTTP, IN_PROCESS, MULTIPLEX, SMG, STREAM, TYPED
from bench.results import Figure, Results, caller_us, server_us

_COLOURS = {
    MULTIPLEX: "#0b6e4f",
    TYPED: "#52b788",
    STREAM: "#4361ee",
    IN_PROCESS: "#6c757d",
    SMG: "#d00000",
    HTTP: "#f48c06",
}
_SIZE = (11.0, 4.4)


def write(results: Results, folder: Path) -> None:
    """Write the plots to a folder."""
    mpl.use("Agg")
    # Makes the files reproducible.
    mpl.rcParams["svg.hashsalt"] = "tokenwire"
    folder.mkdir(parents=True, exist_ok=True)
    _save(_cpu(results), folder / "cpu-per-token")
    _save(_inter_token(results), folder / "inter-token")


def _load_cases(results: Results, step_ms: float | None = None) -> list[Case]:
    """Return the stream cases without log probabilities of one step time, the shortest by default, by concurrency."""
    cases = [case for case in results.plan.cases if not case.unary and case.logprobs is None]
    chosen = min(case.step_ms for case in cases) if step_ms is None else step_ms
    return sorted((case for case in cases if case.step_ms == chosen), key=lambda case: case.concurrency)


def _cpu(results: Results) -> Any:
    cases = _load_cases(results)
    figure, axes = plt.subplots(1, 2, figsize=_SIZE, layout="constrained")
    sides: list[tuple[Any, str, Figure, list[str]]] = [
        (axes[0], "server", server_us, list(_COLOURS)),
        (axes[1], "caller", caller_us, [name for name in _COLOURS if name != IN_PROCESS]),
    ]
    for axis, side, value, names in sides:
        for name in names:
            points = [(case.concurrency, results.median(case, name, value)) for case in cases]
            known = [(x, y) for x, y in points if y is not None]
            if known:
                axis.plot(*zip(*known, strict=True), marker="o", color=_COLOURS[name], label=CONTENDERS[name].label)
        axis.set(title=f"CPU time of the {side}", xlabel="concurrent requests", ylabel="µs for each output token")
        axis.set_xticks([case.concurrency for case in cases])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{cases[0].step_ms:g} ms steps, {cases[0].prompt_tokens} tokens in, {cases[0].output_tokens} out")
    return figure


def _inter_token(results: Results) -> Any:
    step_times = sorted({case.step_ms for case in _all_load_cases(results)})
    figure, axes = plt.subplots(1, len(step_times), figsize=_SIZE, layout="constrained", squeeze=False)
    for axis, step_ms in zip(axes[0], step_times, strict=True):
        case = _load_cases(results, step_ms)[-1]
        names = [name for name in _COLOURS if results.of(case, name)]
        for offset, (percentile, value) in enumerate(_PERCENTILES.items()):
            heights = [results.median(case, name, value) or 0.0 for name in names]
            positions = [number + 0.4 * offset for number in range(len(names))]
            bars = axis.bar(positions, heights, 0.4, label=percentile, color=[_COLOURS[name] for name in names])
            for bar in bars:
                bar.set_alpha(1.0 if offset else 0.5)
            axis.bar_label(bars, fmt="%.1f", fontsize="x-small")
        axis.axhline(step_ms, color="black", linestyle=":", linewidth=1)
        labels = [CONTENDERS[name].label.replace(" ", "\n", 1) for name in names]
        axis.set_xticks([number + 0.2 for number in range(len(names))], labels, fontsize="x-small", rotation=30)
        axis.set(title=case.name, ylabel="ms between tokens: p50 (pale), p99")
    return figure


_PERCENTILES: dict[str, Figure] = {
    "p50": lambda sample: sample.inter_token_p50_ms,
    "p99": lambda sample: sample.inter_token_p99_ms,
}


def _all_load_cases(results: Results) -> list[Case]:
    return [case for case in results.plan.cases if not case.unary and case.logprobs is None]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=120)
    plt.close(figure)
