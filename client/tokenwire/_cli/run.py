"""Runs the sub-commands that call a server, and maps errors to exit codes."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any

import typer

from tokenwire._errors import TokenwireError, UnreachableError

FAILED = 1
UNREACHABLE = 3
INTERRUPTED = 130

# One line, which the help wraps.
EXIT_CODES = (
    "\n\nExit codes: 0 success; 1 the server refused the request, or it failed; 2 invalid arguments, missing package; "
    "3 the server cannot be reached; 130 interrupted."
)


def run(main: Coroutine[Any, Any, None], *, interrupted: int = INTERRUPTED) -> None:
    """Run a sub-command. An error is printed as one line; Ctrl-C cancels the call, and the server aborts its request.

    Raises typer.Exit with the exit code of an error, and with `interrupted` after Ctrl-C.
    """
    try:
        asyncio.run(main)
    except KeyboardInterrupt:
        raise typer.Exit(interrupted) from None
    except TokenwireError as error:
        raise typer.Exit(report(error)) from None
    except BrokenPipeError:
        raise  # the reader closed the pipe: typer exits without a message
    except OSError as error:
        typer.echo(f"tokenwire: cannot write the output: {error.strerror or error}", err=True)
        # The interpreter would flush again at exit, and fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


def report(error: TokenwireError) -> int:
    """Print an error as one line and return its exit code."""
    typer.echo(f"tokenwire: {one_line(error)}", err=True)
    # The cause of a timeout of wait_ready is the last failure to connect.
    return UNREACHABLE if isinstance(error.__cause__ or error, UnreachableError) else FAILED


def one_line(error: TokenwireError) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())
