"""What sub-commands do about packages that the base install lacks."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def requires(hint: str) -> Iterator[None]:
    """End the command with one line, `hint` in it, where an import inside the block finds no module."""
    try:
        yield
    except ModuleNotFoundError as error:
        # A module of ours that imports a missing one of ours is a bug and keeps its traceback.
        if error.name is None or error.name.startswith(("tokenwire.", "tokenwire_server.")):
            raise
        typer.echo(f"tokenwire: this command needs the package {error.name}, which is not installed: {hint}", err=True)
        raise typer.Exit(2) from None
