"""The entry point of the `tokenwire` command.

It is outside `_cli` because the base install has it too, without typer: it then prints which extra to install.
"""

import os
import sys


def main() -> None:
    """Run the command, or print how to install its dependencies."""
    _open_standard_streams()
    try:
        from tokenwire._cli.app import app
    except ModuleNotFoundError as error:
        # Any other missing module is a bug and keeps its traceback.
        if error.name is None or error.name.partition(".")[0] not in {"typer", "rich"}:
            raise
        sys.stderr.write("tokenwire: the command needs its extra: pip install 'tokenwire[cli]'\n")
        sys.exit(2)
    app()


def _open_standard_streams() -> None:
    """Open the standard streams that were closed when the process started, for which Python has None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is the stream's own. Left free, a socket would get it.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)  # noqa: FBT003  # a positional-only parameter
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))
