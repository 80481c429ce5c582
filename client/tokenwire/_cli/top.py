"""`tokenwire top`: shows the load of engines, refreshed periodically."""

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenwire._cli.options import Connect, connect, with_options
from tokenwire._cli.output import print_json
from tokenwire._cli.rates import Rates, Sample, rates
from tokenwire._cli.run import one_line, run
from tokenwire._client import AsyncClient
from tokenwire._engine_load import EngineLoad
from tokenwire._errors import TokenwireError

EXAMPLES = """
Examples:

tokenwire top

tokenwire top gpu-1:50051 gpu-2:50051 --interval 2

tokenwire top --json --count 1
"""

# One line, which the help wraps.
EXIT_CODES = (
    "\n\nExit codes: 0 ended by Ctrl-C or --count; 1 the first refresh was refused; 2 invalid arguments; "
    "3 no server could be reached at the first refresh."
)

_COLUMNS = {
    "server": "{}",
    "rank": "{}",
    "live": "{:,}",
    "running": "{:,}",
    "waiting": "{:,}",
    "tokens/s": "{:,.0f}",
    "prompt tokens/s": "{:,.0f}",
    "KV use": "{:.1%}",
    "cache hits": "{:.1%}",
    "preempted": "{:,}",
}

_MIN_WIDTH = 80


class Row(msgspec.Struct, kw_only=True):
    """One row of the view: a rank of a server, or a server that does not answer. None: unknown."""

    server: str
    rank: int | None = None
    num_live_requests: int | None = None
    """Number of live requests of the server, over all ranks."""
    num_running_reqs: int | None = None
    num_waiting_reqs: int | None = None
    generation_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    kv_cache_usage: float | None = None
    prefix_cache_hit_rate: float | None = None
    """Fraction of the prompt tokens looked up since the last refresh that the prefix cache had, 0 to 1."""
    num_preemptions: int | None = None
    error: str | None = None
    """Why the server did not answer."""

    def cells(self) -> list[str]:
        """Return the texts of the columns."""
        values = list(msgspec.structs.astuple(self))[: len(_COLUMNS)]
        return ["-" if v is None else f.format(v) for v, f in zip(values, _COLUMNS.values(), strict=True)]


class _Server:
    """A server that is polled."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._before: Sample | None = None
        self.error: TokenwireError | None = None

    async def rows(self, timeout: float) -> list[Row]:  # noqa: ASYNC109  # the call's deadline
        name = self._client.target
        try:
            sample = Sample(await self._client.engine_load(timeout=timeout), time.monotonic())
        except TokenwireError as error:
            self.error, self._before = error, None
            return [Row(server=name, error=one_line(error))]
        self.error = None
        before, self._before = self._before, sample
        return _rows(name, sample.load, rates(before, sample))


def _rows(name: str, load: EngineLoad, changes: list[Rates]) -> list[Row]:
    if not load.ranks:
        return [Row(server=name, num_live_requests=load.num_live_requests)]
    return [
        Row(
            server=name,
            rank=rank.data_parallel_rank,
            num_live_requests=load.num_live_requests,
            num_running_reqs=rank.num_running_reqs,
            num_waiting_reqs=rank.num_waiting_reqs,
            kv_cache_usage=rank.kv_cache_usage,
            num_preemptions=rank.num_preemptions,
            **change._asdict(),
        )
        for rank, change in zip(load.ranks, changes, strict=True)
    ]


@with_options("server", connect)
def top(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Servers to watch. [default: that of --target]"),
    ] = None,
    *,
    server: Connect,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds between refreshes.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="Exit after N refreshes.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per rank and refresh.")] = False,
) -> None:
    """Watch the load of engines: requests, tokens per second, queue, KV cache usage. Ctrl-C ends it.

    Shows a table that refreshes on a terminal, and prints one line per rank and refresh elsewhere. A server that does
    not answer is shown with its error and polled again.
    """
    wanted: Sequence[str | None] = targets or [None]

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(server(target)) for target in wanted]
            refreshes = _refreshes([_Server(client) for client in clients], interval, count)
            await (_print_json(refreshes) if json else _watch(refreshes) if _can_redraw() else _print_lines(refreshes))

    # Ctrl-C is the regular end.
    run(main(), interrupted=0)


def _can_redraw() -> bool:
    return sys.stdout.isatty() and not Console().is_dumb_terminal


async def _refreshes(servers: list[_Server], interval: float, count: int | None) -> AsyncIterator[list[Row]]:
    """Yield the rows of each refresh. Raises the first server's error if none answers the first refresh."""
    clock = asyncio.get_running_loop().time
    following = clock()
    for number in itertools.count(1):
        rows = await asyncio.gather(*(server.rows(timeout=max(interval, 5.0)) for server in servers))
        errors = [server.error for server in servers if server.error is not None]
        if number == 1 and len(errors) == len(servers):
            raise errors[0]
        yield list(itertools.chain.from_iterable(rows))
        if number == count:
            return
        # Missed refreshes are skipped.
        following = max(following + interval, clock())
        await asyncio.sleep(following - clock())


async def _print_json(refreshes: AsyncIterator[list[Row]]) -> None:
    async for rows in refreshes:
        for row in rows:
            print_json(row)


async def _print_lines(refreshes: AsyncIterator[list[Row]]) -> None:
    first = True
    async for rows in refreshes:
        lines = [row.cells() for row in rows]
        width = max(len(row.server) for row in rows)
        if first:
            typer.echo(_line(_COLUMNS, width))
            first = False
        for row, cells in zip(rows, lines, strict=True):
            typer.echo(_line(cells, width) if row.error is None else f"{row.server:<{width}}  {row.error}")
        sys.stdout.flush()


def _line(cells: Iterable[str], width: int) -> str:
    first, *others = cells
    return "  ".join(
        [f"{first:<{width}}", *(f"{c:>{len(n)}}" for c, n in zip(others, list(_COLUMNS)[1:], strict=True))]
    )


async def _watch(refreshes: AsyncIterator[list[Row]]) -> None:
    console = Console()
    live = Live(console=console, auto_refresh=False)
    try:
        async for rows in refreshes:
            errors = [Text(f"{row.server}: {row.error}", style="red") for row in rows if row.error is not None]
            live.update(Group(_table(rows, console.width), *errors))
            # After the first refresh: if it fails, only the error is printed.
            live.start()
            live.refresh()
    finally:
        live.stop()


def _table(rows: list[Row], width: int) -> Table:
    # Without borders and with two-line headings, the table fits in 80 columns.
    title = f"tokenwire top, {time.strftime('%H:%M:%S')}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    if width < _MIN_WIDTH:
        # A narrower terminal cuts off the right.
        table.width = _MIN_WIDTH
    server, *numbers = _COLUMNS
    table.add_column(server, vertical="bottom", overflow="fold")
    for name in numbers:
        heading = "\n".join(name.rsplit(" ", 1))
        table.add_column(heading, vertical="bottom", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.cells())
    return table
