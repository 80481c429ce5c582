"""The gRPC channel and its options."""

from collections.abc import Sequence

import grpc.aio

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_CONNECT_TIMEOUT = 10.0
DEFAULT_KEEPALIVE_TIME = 30.0
DEFAULT_KEEPALIVE_TIMEOUT = 20.0
# Room for prompt log probabilities of a long prompt, and for a prompt of about 20 million ids.
DEFAULT_MAX_RECEIVE_MESSAGE_BYTES = 256 * 1024 * 1024
DEFAULT_MAX_SEND_MESSAGE_BYTES = 64 * 1024 * 1024

_INITIAL_RECONNECT_BACKOFF_MS = 200
_MAX_RECONNECT_BACKOFF_MS = 3_000


def check_target(target: str) -> str:
    """Give a target as it is. Raises ValueError for none, and for a URL, of which gRPC would look up the whole as a name."""
    if not target or target.startswith(("http://", "https://")):
        raise ValueError(f"target must be host:port or unix:path, not {target!r}")
    return target


def channel_options(
    *,
    connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
    keepalive_time: float = DEFAULT_KEEPALIVE_TIME,
    keepalive_timeout: float = DEFAULT_KEEPALIVE_TIMEOUT,
    max_receive_message_bytes: int = DEFAULT_MAX_RECEIVE_MESSAGE_BYTES,
    max_send_message_bytes: int = DEFAULT_MAX_SEND_MESSAGE_BYTES,
) -> list[tuple[str, str | int]]:
    """Give the channel's options. gRPC ignores a name that it does not know, so a test compares them with its library."""
    return [
        # A connection of this client's own: clients do not share one connection's throughput, nor its back-off.
        ("grpc.use_local_subchannel_pool", 1),
        # Despite its name, gRPC's limit for one connection attempt, handshakes included.
        ("grpc.min_reconnect_backoff_ms", _milliseconds(connect_timeout)),
        ("grpc.dns_ares_query_timeout", _milliseconds(connect_timeout)),
        ("grpc.initial_reconnect_backoff_ms", _INITIAL_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
        # A long prefill or a unary call is silent for minutes; the pings find a dead peer and keep middle boxes awake.
        ("grpc.keepalive_time_ms", _milliseconds(keepalive_time)),
        ("grpc.keepalive_timeout_ms", _milliseconds(keepalive_timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Else gRPC stops pinging after two pings without data, and with it stops noticing.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_receive_message_bytes),
        ("grpc.max_send_message_length", max_send_message_bytes),
        # Retries are the caller's: only it knows what a second generation costs.
        ("grpc.enable_retries", 0),
    ]


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, str | int]]
) -> grpc.aio.Channel:
    """Make a channel in the running event loop. It connects with the first call."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
