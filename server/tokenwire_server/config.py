"""The server's own options, their defaults, and its exit codes."""

import dataclasses
from enum import IntEnum

OPEN_SERVICES = ("health", "reflection")
"""Services that can be opened to callers without a token."""


class ExitCode(IntEnum):
    """Exit codes of `tokenwire serve`; listed in the README."""

    OK = 0
    """Clean shutdown after a signal."""
    INTERNAL = 1
    """A background task of the server failed; see the log."""
    USAGE = 2
    """Invalid options."""
    STARTUP = 3
    """The address is in use, a certificate or token file is invalid, or the engine could not be loaded."""
    ENGINE_DIED = 4
    """The engine died while serving."""


@dataclasses.dataclass(frozen=True)
class AdapterPath:
    """A LoRA adapter as the command line names it, with the fields of vLLM's JSON form."""

    name: str
    path: str
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the server itself; `arguments` builds it from the command line."""

    host: str = "127.0.0.1"
    """Host name or IP address to listen on; loopback by default."""

    port: int = 50051
    """TCP port to listen on; 0 selects a free port."""

    uds: str | None = None
    """Path of a UNIX domain socket to listen on instead of TCP; None means TCP."""

    uds_mode: int = 0o600
    """File mode of the UNIX domain socket, which determines the local users who can connect."""

    tls_cert: str | None = None
    """PEM file with the server's certificate chain; None means plaintext. This file and the next three are reloaded
    when they change."""

    tls_key: str | None = None
    """PEM file with the certificate's private key; required with `tls_cert`."""

    tls_client_ca: str | None = None
    """PEM file with CA certificates; clients must present a certificate issued by one of them. None means no mTLS."""

    token_file: str | None = None
    """File with bearer tokens, one of which every call must present; None means that no token is required."""

    open_services: tuple[str, ...] = ("health",)
    """Services of `OPEN_SERVICES` that can be called without a token."""

    drain_timeout: float = 30.0
    """Maximum seconds for requests in flight to finish after a stop signal; the rest end with ABORT."""

    max_receive_message_bytes: int = 64 * 1024 * 1024
    """Maximum size of a received message, in bytes: about 16 million token ids."""

    max_send_message_bytes: int = 256 * 1024 * 1024
    """Maximum size of a sent message, in bytes."""

    slow_reader_timeout: float = 60.0
    """Maximum seconds that a client may leave its stream unread before the server ends the stream."""

    engine_timeout: float = 300.0
    """Maximum seconds for one engine step, after which the engine is considered dead; 0 means no limit."""

    stay_after_engine_death: bool = False
    """Whether the process keeps running and refuses all requests after the engine has died."""

    max_requests_per_stream: int = 16_384
    """Maximum number of requests in flight on one Multiplex stream."""

    max_requests_per_client: int | None = None
    """Maximum number of requests in flight of one client: a principal, or a machine if there is no authentication.
    None means no limit."""

    smg: bool = False
    """Whether to also serve `vllm.grpc.engine.VllmEngine`, for smg's gateway."""

    @property
    def address(self) -> str:
        """The address to listen on, in gRPC's notation."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
