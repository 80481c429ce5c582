"""Output of sub-commands: tables on a terminal, plain lines elsewhere, JSON on request."""

import sys
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table


def print_rows(title: str, rows: Sequence[tuple[str, str]], *, justify: Literal["left", "right"] = "left") -> None:
    """Print names and values: a table on a terminal, aligned lines elsewhere.

    Args:
        title: title of the table.
        rows: names and values.
        justify: alignment of the values in the table.

    """
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            typer.echo(f"{name:<{width}}  {value}")
        return
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify=justify, overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def print_note(text: str) -> None:
    """Print a note about the output on standard error if that is a terminal."""
    if sys.stderr.isatty():
        Console(stderr=True).print(text, style="dim", markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    typer.echo(msgspec.json.encode(value, order="sorted"))


def print_part(text: str) -> None:
    """Print a part of a line and flush it."""
    typer.echo(text, nl=False)
    sys.stdout.flush()
