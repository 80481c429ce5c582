"""The help of `tokenwire serve` without vLLM, whose import takes seconds."""

import argparse

from tokenwire_server.process.server_options import add_server_options

_EPILOG = """vLLM's engine options are accepted too: `tokenwire serve --help=all` lists them, `--help=KVTransferConfig` one group
of them, and `--help=max` those whose names contain "max"."""


def print_server_help() -> None:
    """Print the server's own options."""
    parser = argparse.ArgumentParser(
        prog="tokenwire serve",
        usage="tokenwire serve MODEL [options]",
        description="Serve the engine of a model over gRPC: token ids in, token ids out. "
        "All engine options of `vllm serve` are accepted.",
        epilog=_EPILOG,
        add_help=False,
    )
    parser.add_argument("model_tag", metavar="MODEL", help="Name or local folder of the model")
    add_server_options(parser.add_argument_group("tokenwire", argument_default=argparse.SUPPRESS))
    parser.print_help()
