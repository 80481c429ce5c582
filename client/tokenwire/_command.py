"""The entry of the `tokenwire` command, which the base install has too: it names the extra where that is missing."""

import os
import sys


def main() -> None:
    """Run the command, or say in one line how to install what it needs."""
    _open_standard_streams()
    try:
        from tokenwire._cli.app import app
    except ModuleNotFoundError as error:
        # A missing module of our own is a bug and keeps its traceback.
        if error.name is None or error.name.partition(".")[0] not in {"typer", "rich"}:
            raise
        sys.stderr.write("tokenwire: the command needs its extra: pip install 'tokenwire[cli]'\n")
        sys.exit(2)
    app()


def _open_standard_streams() -> None:
    """Give the process the standard streams that whoever started it has closed; Python has None for these."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number is the stream's own, which a socket would get otherwise.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)  # noqa: FBT003  # it has no name
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))
