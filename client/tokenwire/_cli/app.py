"""The `tokenwire` command: one sub-command per module."""

import sys
from typing import Annotated

import typer

from tokenwire._cli import abort, bench, chat, demo_model, generate, health, info, serve, top
from tokenwire._cli.run import EXIT_CODES
from tokenwire._version import __version__


def _print_version(requested: bool) -> None:  # noqa: FBT001  # typer passes the option's value
    if requested:
        typer.echo(f"tokenwire {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve and call a vLLM engine over gRPC: token ids in, token ids out."""


app = typer.Typer(
    name="tokenwire",
    callback=_root,
    no_args_is_help=True,
    # Boxes on a terminal, plain lines for logs, pipes and scripts.
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
    # Plain tracebacks: they may end up in a log.
    pretty_exceptions_enable=False,
)
# `tokenwire serve` parses its arguments itself: most of them are vLLM's engine flags, and its --help lists both.
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(serve.serve)
app.command(epilog=generate.EXAMPLES + EXIT_CODES)(generate.generate)
app.command(epilog=chat.EXAMPLES + EXIT_CODES)(chat.chat)
app.command(epilog=EXIT_CODES)(abort.abort)
app.command(epilog=EXIT_CODES)(info.info)
app.command(epilog=EXIT_CODES)(health.health)
app.command(epilog=top.EXAMPLES + top.EXIT_CODES)(top.top)
app.command()(bench.bench)
app.command()(demo_model.demo_model)
