"""The command line of `tokenwire serve`: vLLM's engine flags, and the server's own."""

import argparse
import dataclasses
from collections.abc import Sequence

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenwire_server import simulated_device
from tokenwire_server.config import ServerConfig
from tokenwire_server.simulated_device.options import SimulatedDeviceOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """The command line, read."""

    server: ServerConfig
    engine: AsyncEngineArgs
    keep_tokenizer: bool
    direct_path: bool
    simulated: bool


def parse(argv: Sequence[str]) -> ServeArguments:
    """Read the arguments of `tokenwire serve`; a bad one ends the process with one line and exit code 2."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    options.model = options.model_tag
    if options.uds is not None and options.host is not None:
        parser.error("--uds and --host exclude each other")
    settings = {
        field.name: value
        for field in dataclasses.fields(ServerConfig)
        if (value := getattr(options, field.name)) is not None
    }
    engine = AsyncEngineArgs.from_cli_args(options)
    if options.simulated_device is not None:
        try:
            simulated_device.configure(engine, options.simulated_device)
        except simulated_device.SimulatedDeviceError as error:
            parser.error(str(error))
    return ServeArguments(
        server=ServerConfig(**settings),
        engine=engine,
        keep_tokenizer=options.keep_tokenizer,
        direct_path=options.direct_path,
        simulated=options.simulated_device is not None,
    )


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # mypy does not read vLLM
    """vLLM's parser with one line in place of its usage, which is 200 lines long, for a bad argument."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tokenwire serve",
        description="Serve a model's engine over gRPC, tokens only. Every engine flag of `vllm serve` works here.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="Name or folder of the model")
    group = parser.add_argument_group("tokenwire")
    default = ServerConfig()
    group.add_argument("--host", help=f"Interface to listen on (default: {default.host})")
    group.add_argument("--port", type=int, help=f"TCP port; 0 lets the system choose (default: {default.port})")
    group.add_argument("--uds", metavar="PATH", help="UNIX socket to listen on in place of TCP")
    group.add_argument(
        "--keep-tokenizer",
        action="store_true",
        help="Load the tokenizer, for structured outputs and reasoning budgets. Never used to detokenize",
    )
    group.add_argument(
        "--simulated-device",
        type=_simulated_device,
        metavar="OPTIONS",
        help="Run the engine on a simulated device, with only the model's config.json: step_ms=10[,...]",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        help=f"Time for running requests to finish after a stop signal (default: {default.drain_timeout:g})",
    )
    group.add_argument(
        "--max-receive-message-bytes",
        type=int,
        metavar="BYTES",
        help=f"Largest message taken (default: {default.max_receive_message_bytes})",
    )
    group.add_argument(
        "--max-send-message-bytes",
        type=int,
        metavar="BYTES",
        help=f"Largest message sent (default: {default.max_send_message_bytes})",
    )
    group.add_argument(
        "--slow-reader-timeout",
        type=float,
        metavar="SECONDS",
        help=f"Time that a caller may leave its stream unread (default: {default.slow_reader_timeout:g})",
    )
    group.add_argument(
        "--max-requests-per-stream",
        type=int,
        metavar="N",
        help=f"Most live requests of one Multiplex stream (default: {default.max_requests_per_stream})",
    )
    group.add_argument(
        "--no-direct-path",
        dest="direct_path",
        action="store_false",
        help="Take vLLM's ordinary way for all outputs; costs more CPU for each token",
    )
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def _simulated_device(text: str) -> SimulatedDeviceOptions:
    try:
        return simulated_device.parse(text)
    except simulated_device.SimulatedDeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
