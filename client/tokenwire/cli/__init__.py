"""The `tokenwire` command: one module per sub-command, each importing what it needs when it runs."""

import sys
from typing import Annotated

import typer

from tokenwire._version import __version__
from tokenwire.cli import _chat, _generate, _top
from tokenwire.cli._abort import abort
from tokenwire.cli._bench import bench
from tokenwire.cli._chat import chat
from tokenwire.cli._demo_model import demo_model
from tokenwire.cli._generate import generate
from tokenwire.cli._health import health
from tokenwire.cli._info import info
from tokenwire.cli._run import EXIT_CODES
from tokenwire.cli._serve import serve
from tokenwire.cli._top import top

__all__ = ["app"]


def _print_version(requested: bool) -> None:  # noqa: FBT001  # typer calls it with the option's value
    if requested:
        typer.echo(f"tokenwire {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run and call a gRPC engine for vLLM: token ids in, token ids out."""


app = typer.Typer(
    name="tokenwire",
    callback=_root,
    no_args_is_help=True,
    # Boxes for people; plain lines for logs, pipes and scripts.
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
    # Plain tracebacks: a server's log is no place for boxes.
    pretty_exceptions_enable=False,
)
# `tokenwire serve` reads its arguments itself: vLLM's engine flags are far more than ours, and --help shows both.
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(serve)
app.command(epilog=_generate.EXAMPLES + EXIT_CODES)(generate)
app.command(epilog=_chat.EXAMPLES + EXIT_CODES)(chat)
app.command(epilog=EXIT_CODES)(abort)
app.command(epilog=EXIT_CODES)(info)
app.command(epilog=EXIT_CODES)(health)
app.command(epilog=_top.EXAMPLES + _top.EXIT_CODES)(top)
app.command()(bench)
app.command()(demo_model)
