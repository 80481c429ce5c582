"""`tokenwire serve`: passes all arguments to the server package."""

import typer

from tokenwire._cli.requires import requires


def serve(context: typer.Context) -> None:
    """Serve a model over gRPC; `tokenwire serve --help` lists the options."""
    with requires("pip install 'tokenwire[gpu]', or `make setup` in a clone for the CPU engine"):
        if not {"-h", "--help"}.isdisjoint(context.args):
            # vLLM's own options are in --help=all; its import alone takes seconds.
            from tokenwire_server.process.server_help import print_server_help

            print_server_help()
            return
        from tokenwire_server.process.main import main
    raise typer.Exit(main(list(context.args)))
