"""The command line of `tokenwire serve`: vLLM's engine flags, and the server's own."""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import LoRAParserAction
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenwire_server import simulated_device
from tokenwire_server.config import OPEN_SERVICES, ExitCode, ServerConfig
from tokenwire_server.conversion.exceptions import first_line
from tokenwire_server.engine.adapters import AdapterError, to_adapters
from tokenwire_server.services import smg
from tokenwire_server.simulated_device.options import SimulatedDeviceOptions

_MAX_MESSAGE_BYTES = 2**31 - 1
_MAX_PORT = 65_535


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """The command line, read."""

    server: ServerConfig
    engine: AsyncEngineArgs
    keep_tokenizer: bool
    adapters: list[LoRARequest]
    direct_path: bool
    simulated: bool


def parse(argv: Sequence[str]) -> ServeArguments:
    """Read the arguments of `tokenwire serve`.

    A bad one ends the process with one line and exit code 2, a model that is not there with exit code 3.
    """
    parser = _parser()
    options = parser.parse_args(list(argv), _unset())
    options.model = options.model_tag
    if (fault := _conflict(options)) is not None:
        parser.error(fault)
    settings = {
        field.name: value
        for field in dataclasses.fields(ServerConfig)
        if (value := getattr(options, field.name)) is not None
    }
    adapters = _adapters(options)
    engine = _engine_args(options)
    if options.simulated_device is not None:
        try:
            simulated_device.configure(engine, options.simulated_device)
        except simulated_device.SimulatedDeviceError as error:
            parser.error(str(error))
    return ServeArguments(
        server=ServerConfig(**settings),
        engine=engine,
        keep_tokenizer=options.keep_tokenizer,
        adapters=adapters,
        direct_path=options.direct_path,
        simulated=options.simulated_device is not None,
    )


def _unset() -> argparse.Namespace:
    """Return what our own options are where they are not given; None stands for ServerConfig's default."""
    ours = {field.name: None for field in dataclasses.fields(ServerConfig)}
    return argparse.Namespace(**ours, keep_tokenizer=False, simulated_device=None, direct_path=True)


def _conflict(options: argparse.Namespace) -> str | None:
    """Say which options do not go together."""
    if options.uds is not None and options.host is not None:
        return "--uds and --host exclude each other"
    if options.uds_mode is not None and options.uds is None:
        return "--uds-mode needs --uds"
    if (options.tls_cert is None) != (options.tls_key is None):
        return "--tls-cert and --tls-key need each other"
    if options.tls_client_ca is not None and options.tls_cert is None:
        return "--tls-client-ca needs --tls-cert and --tls-key"
    if options.open_services is not None and options.token_file is None:
        return "--open-services needs --token-file"
    if options.smg and (missing := smg.missing()) is not None:
        return f"--smg needs the extra smg: pip install 'tokenwire[smg]' ({missing})"
    return None


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # mypy does not read vLLM
    """vLLM's parser with one line in place of its usage, which is 200 lines long, for a bad argument."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _engine_args(options: argparse.Namespace) -> AsyncEngineArgs:
    # vLLM would take it for a name on the hub and complain about its form.
    if options.model.startswith(("/", "./", "../")) and not Path(options.model).exists():
        fault = "there is no such folder"
    else:
        try:
            return AsyncEngineArgs.from_cli_args(options)
        except (OSError, ValueError) as error:  # with HF_HUB_OFFLINE it looks for the model here
            fault = first_line(error)
    raise _cannot_load(options, fault)


def _adapters(options: argparse.Namespace) -> list[LoRARequest]:
    options.enable_lora = options.enable_lora or bool(options.lora_modules)
    try:
        return to_adapters(options.lora_modules, [*(options.served_model_name or ()), options.model])
    except AdapterError as error:
        raise _cannot_load(options, str(error)) from None


def _cannot_load(options: argparse.Namespace, fault: str) -> SystemExit:
    sys.stderr.write(f"tokenwire: error: cannot load {options.model}: {fault}\n")
    return SystemExit(ExitCode.STARTUP)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tokenwire serve",
        description="Serve a model's engine over gRPC, tokens only. Every engine flag of `vllm serve` works here.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="Name or folder of the model")
    # vLLM's help adds every default by itself, and would call ours None: their help says what it is.
    group = parser.add_argument_group("tokenwire", argument_default=argparse.SUPPRESS)
    default = ServerConfig()
    group.add_argument("--host", help=f"Interface to listen on (default: {default.host})")
    group.add_argument("--port", type=_port, help=f"TCP port; 0 lets the system choose (default: {default.port})")
    group.add_argument("--uds", metavar="PATH", help="UNIX socket to listen on in place of TCP")
    group.add_argument(
        "--uds-mode",
        type=_file_mode,
        metavar="MODE",
        help=f"File mode of that socket, as for chmod (default: {default.uds_mode:04o})",
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="TLS certificate and its chain, PEM; read again when it changes"
    )
    group.add_argument("--tls-key", metavar="FILE", help="Key of that certificate, PEM; read again when it changes")
    group.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="Authorities, PEM: only clients with a certificate of theirs can connect; read again when it changes",
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="Bearer tokens, one a line, each with a name before it or not: a call must show one; read again when it changes",
    )
    group.add_argument(
        "--open-services",
        type=_open_services,
        metavar="LIST",
        help=f"Which of {','.join(OPEN_SERVICES)} need no token, or none (default: {','.join(default.open_services)})",
    )
    group.add_argument(
        "--keep-tokenizer",
        action="store_true",
        help="Load the tokenizer, for structured outputs and reasoning budgets. Never used to detokenize",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action=LoRAParserAction,
        default=[],
        metavar="NAME=PATH",
        help="LoRA adapters that requests may name as their model, as NAME=PATH or in vLLM's JSON form; implies --enable-lora",
    )
    group.add_argument(
        "--simulated-device",
        type=_simulated_device,
        metavar="OPTIONS",
        help="Run the engine on a simulated device, with only the model's config.json: step_ms=10[,...]",
    )
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        metavar="SECONDS",
        help=f"Time for running requests to finish after a stop signal (default: {default.drain_timeout:g})",
    )
    group.add_argument(
        "--max-receive-message-bytes",
        type=_message_bytes,
        metavar="BYTES",
        help=f"Largest message taken (default: {default.max_receive_message_bytes})",
    )
    group.add_argument(
        "--max-send-message-bytes",
        type=_message_bytes,
        metavar="BYTES",
        help=f"Largest message sent (default: {default.max_send_message_bytes})",
    )
    group.add_argument(
        "--slow-reader-timeout",
        type=_seconds_above_0,
        metavar="SECONDS",
        help=f"Time that a caller may leave its stream unread (default: {default.slow_reader_timeout:g})",
    )
    group.add_argument(
        "--engine-timeout",
        type=_seconds,
        metavar="SECONDS",
        help=f"Time for a step after which the engine counts as dead; 0 for no limit (default: {default.engine_timeout:g})",
    )
    group.add_argument(
        "--stay-after-engine-death",
        action="store_true",
        help="Keep the process, refusing all requests, when its engine has died; it ends with exit code 4 otherwise",
    )
    group.add_argument(
        "--max-requests-per-stream",
        type=_positive,
        metavar="N",
        help=f"Most live requests of one Multiplex stream (default: {default.max_requests_per_stream})",
    )
    group.add_argument(
        "--max-requests-per-client",
        type=_positive,
        metavar="N",
        help="Most live requests of one token or certificate name, else of one machine (default: no limit)",
    )
    group.add_argument(
        "--smg",
        action="store_true",
        help="Serve vllm.grpc.engine.VllmEngine beside our service, for smg's gateway; needs the extra smg",
    )
    group.add_argument(
        "--no-direct-path",
        dest="direct_path",
        action="store_false",
        help="Take vLLM's ordinary way for all outputs; costs more CPU for each token",
    )
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def _port(text: str) -> int:
    # gRPC takes the number modulo 65,536.
    if not (text.isascii() and text.isdigit() and int(text) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {_MAX_PORT}, not {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, not {text!r}")
    return seconds


def _seconds_above_0(text: str) -> float:
    if not (seconds := _seconds(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return seconds


def _message_bytes(text: str) -> int:
    # gRPC's own limit of the option.
    if (number := _positive(text)) > _MAX_MESSAGE_BYTES:
        raise argparse.ArgumentTypeError(f"must be at most {_MAX_MESSAGE_BYTES}, not {text}")
    return number


def _file_mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"must be three octal digits, 0660 for example, not {text!r}")
    return int(text, 8)


def _open_services(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if unknown := [name for name in names if name not in OPEN_SERVICES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(OPEN_SERVICES)}")
    return names


def _simulated_device(text: str) -> SimulatedDeviceOptions:
    try:
        return simulated_device.parse(text)
    except simulated_device.SimulatedDeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
