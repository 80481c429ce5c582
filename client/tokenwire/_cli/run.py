"""How sub-commands that call a server run and end."""

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
    except BrokenPipeError:
        raise  # whoever read has enough, which typer ends quietly
    except OSError as error:
        typer.echo(f"tokenwire: cannot write the output: {error.strerror or error}", err=True)
        # The interpreter would try once more at its end, and fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


def report(error: TokenwireError) -> int:
    """Print an error as one line and give its exit code."""
    typer.echo(f"tokenwire: {' '.join(str(error).split())}", err=True)
    # Where the time to wait for a server is over, the cause is what was in the way.
    return UNREACHABLE if isinstance(error.__cause__ or error, UnreachableError) else FAILED
