"""The entry of the `tokenwire` command, which the base install has too: it names the extra where that is missing."""

import sys


def main() -> None:
    """Run the command, or say in one line how to install what it needs."""
    try:
        from tokenwire.cli import app
    except ModuleNotFoundError as error:
        # A missing module of our own is a bug and keeps its traceback.
        if error.name is None or error.name.partition(".")[0] not in {"typer", "rich"}:
            raise
        sys.stderr.write("tokenwire: the command needs its extra: pip install 'tokenwire[cli]'\n")
        sys.exit(2)
    app()
