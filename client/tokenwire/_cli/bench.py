"""`tokenwire bench`: throughput, latency and CPU cost of a server."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tokenwire._bench.workload import Lengths, Mode, Workload
from tokenwire._cli.options import Connect, connect, with_options
from tokenwire._cli.output import print_rows
from tokenwire._cli.requires import requires
from tokenwire._cli.run import FAILED, INTERRUPTED
from tokenwire._errors import TokenwireError

if TYPE_CHECKING:
    from tokenwire._bench.recording import Summary
    from tokenwire._bench.run import BenchRun, ProcessCost, Report

_DEFAULT_REQUESTS = 200
_DEFAULT_CONCURRENCY = 32
_MIB = 1024 * 1024
_REFRESH_INTERVAL = 0.25


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@with_options("server", connect)
def bench(
    address: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="The server: host:port or unix:/path. [default: that of --target]"),
    ] = None,
    *,
    server: Connect,
    mode: Annotated[Mode, typer.Option(help="The RPC that carries the requests.")] = Mode.STREAM,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of requests; {_DEFAULT_REQUESTS} without --duration."),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds after which no more requests start; requests in flight finish."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help=f"Maximum number of requests in flight; {_DEFAULT_CONCURRENCY} without --rate."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Requests per second, at random times (Poisson). Without it, one starts when another ends."
        ),
    ] = None,
    prompt_tokens: Annotated[
        Lengths, typer.Option(parser=_lengths, metavar="N[-M]", help="Number of prompt tokens, or a range.")
    ] = "128",  # type: ignore[assignment]  # typer parses it
    output_tokens: Annotated[
        Lengths, typer.Option(parser=_lengths, metavar="N[-M]", help="Number of output tokens, or a range.")
    ] = "128",  # type: ignore[assignment]
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="Number of most likely tokens to return log probabilities for, per output token."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--stop-at-eos", help="Continue generating after EOS, up to the full length.")
    ] = True,
    warmup: Annotated[int, typer.Option(min=0, help="Number of requests before the measurement, one at a time.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the requests; equal seeds send equal requests.")] = 0,
    server_pid: Annotated[
        int | None,
        typer.Option(
            min=1, help="Process id of the server, to measure its CPU and memory; found if it listens on this machine."
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the report as JSON; - prints it in place of the table.")
    ] = None,
) -> None:
    """Benchmark a tokenwire server: throughput, latency and CPU time per token.

    Prompts are random token ids. The first request that fails ends the run: the command prints the error and what was
    measured until then, and exits with 1. The server's CPU and memory are its own process's, without the engine's.
    """
    workload = Workload(
        mode=mode,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests=_DEFAULT_REQUESTS if requests is None and duration is None else requests,
        duration_s=duration,
        concurrency=_DEFAULT_CONCURRENCY if concurrency is None and rate is None else concurrency,
        rate=rate,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
        warmup=warmup,
        seed=seed,
    )
    with requires("pip install 'tokenwire[cli]'"):
        from tokenwire._bench.process_usage import find_listener
        from tokenwire._bench.run import BenchRun, WorkloadError
    run = BenchRun(
        lambda: server(address),
        workload,
        server_pid=find_listener(server(address).target) if server_pid is None else server_pid,
        caller_pid=os.getpid(),
    )
    try:
        error, exit_code = asyncio.run(_run(run))
    except WorkloadError as refused:
        typer.echo(f"tokenwire: {refused}", err=True)
        raise typer.Exit(2) from None
    report = run.report(error)
    if json is not None:
        _write_json(report, json)
    if json != "-" and report.requests_started:
        print_rows(f"{report.target}  {report.model or ''}", _rows(report), justify="right")
    if error is not None:
        typer.echo(f"tokenwire: {_stopped(report)}{error}", err=True)
    raise typer.Exit(exit_code)


async def _run(run: "BenchRun") -> tuple[str | None, int]:
    """Run with a progress bar on a terminal. Return why the run ended early, None if it did not, and the exit code."""
    progress = _progress(run)
    watcher = asyncio.create_task(_show(run, progress))
    try:
        await run.run()
    except TokenwireError as error:
        return str(error), FAILED
    except asyncio.CancelledError:
        # Ctrl-C cancels the main task.
        return "interrupted", INTERRUPTED
    finally:
        watcher.cancel()
        progress.stop()
    return None, 0


def _progress(run: "BenchRun") -> Progress:
    # On standard error, so that a piped report stays clean; disabled if that is not a terminal.
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )
    progress.add_task("requests", total=run.workload.requests)
    return progress


async def _show(run: "BenchRun", progress: Progress) -> None:
    progress.start()
    while True:
        progress.update(progress.task_ids[0], completed=run.completed, refresh=True)
        await asyncio.sleep(_REFRESH_INTERVAL)


def _write_json(report: "Report", file: str) -> None:
    text = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if file == "-":
        sys.stdout.write(text.decode())
        return
    try:
        Path(file).write_bytes(text)
    except OSError as error:
        typer.echo(f"tokenwire: cannot write {file}: {error.strerror}", err=True)
        raise typer.Exit(FAILED) from None


def _stopped(report: "Report") -> str:
    if not report.requests_started:
        return ""
    planned = "" if report.workload.requests is None else f" of {report.workload.requests}"
    return f"stopped after {report.requests_completed}{planned} requests: "


def _rows(report: "Report") -> list[tuple[str, str]]:
    workload = report.workload
    return [
        ("mode", workload.mode),
        ("requests", f"{report.requests_completed} completed in {report.wall_s:.2f} s"),
        ("throughput", f"{report.output_tokens_per_s:,.0f} tokens/s, {report.requests_per_s:,.2f} requests/s"),
        ("tokens", f"{report.prompt_tokens:,} in, {report.output_tokens:,} out"),
        ("time to first token", _summary(report.time_to_first_token_ms)),
        ("inter-token", _summary(report.inter_token_ms)),
        ("end to end", _summary(report.end_to_end_ms)),
        ("caller", _cost(report.caller)),
        ("server", _cost(report.server)),
    ]


def _summary(summary: "Summary | None") -> str:
    if summary is None:
        return "not measured"
    return f"p50 {summary.p50:.2f}, p90 {summary.p90:.2f}, p99 {summary.p99:.2f}, max {summary.max:.2f} ms"


def _cost(cost: "ProcessCost | None") -> str:
    if cost is None:
        return "unknown: no process on this machine was given or found"
    cpu = "CPU unknown" if cost.cpu_us_per_token is None else f"{cost.cpu_us_per_token:.1f} µs CPU/token"
    memory = "memory unknown" if cost.memory_bytes is None else f"{cost.memory_bytes / _MIB:.0f} MiB"
    return f"{cpu}, {memory} (process {cost.pid})"
