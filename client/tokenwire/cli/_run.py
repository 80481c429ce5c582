"""How sub-commands that call a server run and end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import typer

from tokenwire._errors import TokenwireError, UnreachableError

FAILED = 1
UNREACHABLE = 3
INTERRUPTED = 130

# One line: the help wraps it.
EXIT_CODES = (
    "\n\nExit codes: 0 done; 1 the server refused the request or it failed; 2 wrong arguments, or a missing package; "
    "3 the server cannot be reached; 130 interrupted."
)


def run(main: Coroutine[Any, Any, None], *, interrupted: int = INTERRUPTED) -> None:
    """Run to the end. An error is one line and its exit code; Ctrl-C cancels what runs on the server.

    `interrupted` is the exit code after Ctrl-C.
    """
    try:
        asyncio.run(main)
    except KeyboardInterrupt:
        raise typer.Exit(interrupted) from None
    except TokenwireError as error:
        raise typer.Exit(report(error)) from None


def report(error: TokenwireError) -> int:
    """Print an error as one line and give its exit code."""
    typer.echo(f"tokenwire: {' '.join(str(error).split())}", err=True)
    return UNREACHABLE if isinstance(error, UnreachableError) else FAILED
