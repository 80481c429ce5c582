"""Sub-commands that need packages of an extra."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def requires(hint: str) -> Iterator[None]:
    """End the command with one line, which has `hint`, if an import inside the block finds no module."""
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of tokenwire itself is a bug and keeps its traceback.
        if error.name is None or error.name.startswith(("tokenwire.", "tokenwire_server.")):
            raise
        typer.echo(f"tokenwire: this command needs the package {error.name}, which is not installed: {hint}", err=True)
        raise typer.Exit(2) from None
