"""The server's own options with their defaults, and its exit codes: what the command line and the server agree on."""

import dataclasses
from enum import IntEnum

OPEN_SERVICES = ("health", "reflection")
"""Services that may be open to callers without a token."""


class ExitCode(IntEnum):
    """Exit codes of `tokenwire serve`; listed in the README."""

    OK = 0
    """A stop signal, and a clean end."""
    INTERNAL = 1
    """A background task of the server failed; the log has the cause."""
    USAGE = 2
    """Bad options."""
    STARTUP = 3
    """The address is taken, a file of certificates or tokens is not right, or the engine could not be started."""
    ENGINE_DIED = 4
    """The engine died while serving."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the server itself; `arguments` makes it from the command line."""

    host: str = "127.0.0.1"
    """Interface to listen on. Loopback unless another one is asked for."""

    port: int = 50051
    """TCP port; 0 lets the system choose."""

    uds: str | None = None
    """Path of a UNIX socket to listen on in place of TCP; None means TCP."""

    uds_mode: int = 0o600
    """File mode of that socket: who of the machine's users may connect."""

    tls_cert: str | None = None
    """File with the TLS certificate and its chain; None means plain text. Read again when it changes, as are all these."""

    tls_key: str | None = None
    """File with the certificate's key; goes with `tls_cert`."""

    tls_client_ca: str | None = None
    """File with the authorities whose certificates clients must show; None asks them for none."""

    token_file: str | None = None
    """File with the bearer tokens of which a call must show one; None asks for none."""

    open_services: tuple[str, ...] = ("health",)
    """Which of "health" and "reflection" need no token."""

    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after a stop signal; then they end with ABORT."""

    max_receive_message_bytes: int = 64 * 1024 * 1024
    """Largest message taken, in bytes: 16 million token ids or so."""

    max_send_message_bytes: int = 256 * 1024 * 1024
    """Largest message sent, in bytes."""

    slow_reader_timeout: float = 60.0
    """Seconds that a caller may leave a message of its stream unread before the stream is ended."""

    engine_timeout: float = 300.0
    """Seconds that the engine may take for one step before it counts as dead; 0 means no limit."""

    stay_after_engine_death: bool = False
    """Whether the process stays up, refusing all requests, when its engine has died."""

    max_requests_per_stream: int = 16_384
    """Most live requests of one Multiplex stream."""

    max_requests_per_client: int | None = None
    """Most live requests of one principal, or of one machine where there is no authentication; None means no limit."""

    smg: bool = False
    """Whether `vllm.grpc.engine.VllmEngine`, which smg's gateway speaks, is served beside our service."""

    @property
    def address(self) -> str:
        """The address to listen on, in gRPC's notation."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
