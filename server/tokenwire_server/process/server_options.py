"""The server's own command-line options, in addition to vLLM's engine options."""

import argparse

from tokenwire_server.config import OPEN_SERVICES, ServerConfig
from tokenwire_server.process import argument_types


def add_server_options(group: argparse._ArgumentGroup) -> None:
    """Add the server's options to an argument group; the help text of each contains its default."""
    default = ServerConfig()
    _add_listening_options(group, default)
    _add_engine_options(group)
    _add_limit_options(group, default)
    _add_service_options(group)


def _add_listening_options(group: argparse._ArgumentGroup, default: ServerConfig) -> None:
    group.add_argument("--host", help=f"Host name or IP address to listen on (default: {default.host})")
    group.add_argument(
        "--port",
        type=argument_types.port,
        help=f"TCP port to listen on; 0 selects a free port (default: {default.port})",
    )
    group.add_argument("--uds", metavar="PATH", help="Path of a UNIX domain socket to listen on instead of TCP")
    group.add_argument(
        "--uds-mode",
        type=argument_types.file_mode,
        metavar="MODE",
        help=f"File mode of the UNIX domain socket, in octal (default: {default.uds_mode:04o})",
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="PEM file with the server's certificate chain; reloaded when it changes"
    )
    group.add_argument(
        "--tls-key", metavar="FILE", help="PEM file with the certificate's private key; reloaded when it changes"
    )
    group.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="PEM file with CA certificates; clients must present a certificate issued by one of them (mTLS); "
        "reloaded when it changes",
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="File with bearer tokens, one per line, as NAME TOKEN or TOKEN; every call must present one of them; "
        "reloaded when it changes",
    )
    group.add_argument(
        "--open-services",
        type=argument_types.open_services,
        metavar="LIST",
        help=f"Comma-separated list of services that can be called without a token, from {', '.join(OPEN_SERVICES)}; "
        f"or none (default: {','.join(default.open_services)})",
    )


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--keep-tokenizer",
        action="store_true",
        help="Load the tokenizer, which structured outputs and thinking token budgets require; it is never used to "
        "detokenize",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        type=argument_types.adapter_path,
        default=[],
        metavar="NAME=PATH",
        help="LoRA adapters that requests can select as their model, as NAME=PATH or in vLLM's JSON form; implies "
        "--enable-lora",
    )
    group.add_argument(
        "--simulated-device",
        type=argument_types.simulated_device_options,
        metavar="OPTIONS",
        help="Run the engine on a simulated device, which needs only the model's config.json: step_ms=10[,...]",
    )
    group.add_argument(
        "--no-direct-path",
        dest="direct_path",
        action="store_false",
        help="Process all outputs with vLLM's output processor, which costs more CPU time per token",
    )


def _add_limit_options(group: argparse._ArgumentGroup, default: ServerConfig) -> None:
    group.add_argument(
        "--drain-timeout",
        type=argument_types.seconds,
        metavar="SECONDS",
        help=f"Maximum time for requests in flight to finish after a stop signal (default: {default.drain_timeout:g})",
    )
    group.add_argument(
        "--max-receive-message-bytes",
        type=argument_types.message_bytes,
        metavar="BYTES",
        help=f"Maximum size of a received message (default: {default.max_receive_message_bytes})",
    )
    group.add_argument(
        "--max-send-message-bytes",
        type=argument_types.message_bytes,
        metavar="BYTES",
        help=f"Maximum size of a sent message (default: {default.max_send_message_bytes})",
    )
    group.add_argument(
        "--slow-reader-timeout",
        type=argument_types.positive_seconds,
        metavar="SECONDS",
        help="Maximum time that a client may leave its stream unread before the server ends the stream "
        f"(default: {default.slow_reader_timeout:g})",
    )
    group.add_argument(
        "--engine-timeout",
        type=argument_types.seconds,
        metavar="SECONDS",
        help="Maximum time for one engine step, after which the engine is considered dead; 0 means no limit "
        f"(default: {default.engine_timeout:g})",
    )
    group.add_argument(
        "--stay-after-engine-death",
        action="store_true",
        help="Keep the process running and refuse requests after the engine has died, instead of exiting with code 4",
    )
    group.add_argument(
        "--max-requests-per-stream",
        type=argument_types.positive_int,
        metavar="N",
        help="Maximum number of requests in flight on one Multiplex stream "
        f"(default: {default.max_requests_per_stream})",
    )
    group.add_argument(
        "--max-requests-per-client",
        type=argument_types.positive_int,
        metavar="N",
        help="Maximum number of requests in flight of one client, which is a token or certificate name, or a machine "
        "if there is no authentication (default: no limit)",
    )


def _add_service_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--smg",
        action="store_true",
        help="Also serve vllm.grpc.engine.VllmEngine, for smg's gateway; requires the extra smg",
    )
