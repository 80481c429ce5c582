"""The command line of `tokenwire serve`: vLLM's engine options and the server's own, parsed and checked."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenwire_server import simulated_device
from tokenwire_server.config import ExitCode, ServerConfig
from tokenwire_server.conversion.exceptions import first_line
from tokenwire_server.engine.adapters import AdapterError, to_adapters
from tokenwire_server.process.server_options import add_server_options
from tokenwire_server.services import smg


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """The parsed command line."""

    server: ServerConfig
    engine: AsyncEngineArgs
    keep_tokenizer: bool
    """Whether the engine loads the tokenizer."""
    adapters: list[LoRARequest]
    direct_path: bool
    """Whether outputs may bypass vLLM's output processor."""
    simulated: bool
    """Whether the engine runs on the simulated device."""


def parse(argv: Sequence[str]) -> ServeArguments:
    """Parse the arguments of `tokenwire serve`.

    Returns:
        The parsed command line.

    Raises:
        SystemExit: after one line on stderr; code 2 for an invalid argument, 3 for a model or adapter that cannot be
            loaded, 0 after --help.

    """
    parser = _parser()
    options = parser.parse_args(list(argv), _unset())
    options.model = options.model_tag
    if (conflict := _conflict(options)) is not None:
        parser.error(conflict)
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
    """Return the server's own options as if none were given; None stands for ServerConfig's default."""
    own = {field.name: None for field in dataclasses.fields(ServerConfig)}
    return argparse.Namespace(**own, keep_tokenizer=False, simulated_device=None, direct_path=True)


def _conflict(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the combination of options; None if they can be combined."""
    if options.uds is not None and options.host is not None:
        return "--uds and --host are mutually exclusive"
    if options.uds_mode is not None and options.uds is None:
        return "--uds-mode requires --uds"
    if (options.tls_cert is None) != (options.tls_key is None):
        return "--tls-cert and --tls-key must be given together"
    if options.tls_client_ca is not None and options.tls_cert is None:
        return "--tls-client-ca requires --tls-cert and --tls-key"
    if options.open_services is not None and options.token_file is None:
        return "--open-services requires --token-file"
    if options.smg and (missing := smg.missing()) is not None:
        return f"--smg requires the extra smg: pip install 'tokenwire[smg]' ({missing})"
    return None


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # mypy does not read vLLM
    """vLLM's parser; an invalid argument prints one line instead of vLLM's usage, which has 200."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _engine_args(options: argparse.Namespace) -> AsyncEngineArgs:
    # vLLM would treat the path as an invalid name on the Hugging Face Hub.
    if options.model.startswith(("/", "./", "../")) and not Path(options.model).exists():
        reason = "the folder does not exist"
    else:
        try:
            return AsyncEngineArgs.from_cli_args(options)
        except (OSError, ValueError) as error:  # with HF_HUB_OFFLINE vLLM resolves the model here
            reason = first_line(error)
    raise _cannot_load(options, reason)


def _adapters(options: argparse.Namespace) -> list[LoRARequest]:
    options.enable_lora = options.enable_lora or bool(options.lora_modules)
    try:
        return to_adapters(options.lora_modules, [*(options.served_model_name or ()), options.model])
    except AdapterError as error:
        raise _cannot_load(options, str(error)) from None


def _cannot_load(options: argparse.Namespace, reason: str) -> SystemExit:
    sys.stderr.write(f"tokenwire: error: cannot load {options.model}: {reason}\n")
    return SystemExit(ExitCode.STARTUP)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tokenwire serve",
        description="Serve the engine of a model over gRPC: token ids in, token ids out. "
        "All engine options of `vllm serve` are accepted.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="Name or local folder of the model")
    # vLLM's help formatter appends every default, which would be None here; our help texts contain the actual ones.
    add_server_options(parser.add_argument_group("tokenwire", argument_default=argparse.SUPPRESS))
    AsyncEngineArgs.add_cli_args(parser)
    return parser
