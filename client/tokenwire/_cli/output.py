"""What sub-commands print: for people on a terminal, plain elsewhere, JSON where asked for."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table


def print_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print names with values: a table on a terminal, aligned lines elsewhere."""
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            typer.echo(f"{name:<{width}}  {value}")
        return
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def print_note(text: str) -> None:
    """Print something about the output beside it, where a person watches."""
    if sys.stderr.isatty():
        Console(stderr=True).print(text, style="dim", markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    typer.echo(msgspec.json.encode(value, order="sorted"))


def print_part(text: str) -> None:
    """Print a part of a line at once."""
    typer.echo(text, nl=False)
    sys.stdout.flush()
