"""The gRPC channel and its options."""

from collections.abc import Sequence

import grpc.aio

from tokenwire._target import DEFAULT_PORT

DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_CONNECT_TIMEOUT = 10.0
# Below the idle timeouts of common load balancers and NAT gateways, 60 seconds and more.
DEFAULT_KEEPALIVE_TIME = 30.0
# gRPC's own default.
DEFAULT_KEEPALIVE_TIMEOUT = 20.0
# Room for the prompt log probabilities of a long prompt.
DEFAULT_MAX_RECEIVE_MESSAGE_BYTES = 256 * 1024 * 1024
# Room for a prompt of about 20 million token ids: a varint takes 3 bytes for ids up to 2,097,151.
DEFAULT_MAX_SEND_MESSAGE_BYTES = 64 * 1024 * 1024

# gRPC's defaults, 1 second and 2 minutes, would keep calls failing long after a server has restarted.
_INITIAL_RECONNECT_BACKOFF_MS = 200
_MAX_RECONNECT_BACKOFF_MS = 3_000


def channel_options(
    *,
    connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
    keepalive_time: float = DEFAULT_KEEPALIVE_TIME,
    keepalive_timeout: float = DEFAULT_KEEPALIVE_TIMEOUT,
    max_receive_message_bytes: int = DEFAULT_MAX_RECEIVE_MESSAGE_BYTES,
    max_send_message_bytes: int = DEFAULT_MAX_SEND_MESSAGE_BYTES,
    enable_http_proxy: bool = False,
) -> list[tuple[str, str | int]]:
    """Return the channel arguments. gRPC ignores unknown names, so a test looks these up in its library.

    Args:
        connect_timeout: maximum number of seconds for one connection attempt, handshakes included.
        keepalive_time: seconds between keepalive pings.
        keepalive_timeout: seconds to wait for the answer to a ping.
        max_receive_message_bytes: largest message to receive. -1: no limit.
        max_send_message_bytes: largest message to send. -1: no limit.
        enable_http_proxy: whether to connect through the HTTP proxy of the environment.

    Returns:
        The arguments as name and value.

    """
    # gRPC's own default is to use them, and a proxy for the web refuses or breaks a connection between two engines.
    proxies: list[tuple[str, str | int]] = [
        # http_proxy, https_proxy, grpc_proxy and the lists of exceptions.
        ("grpc.enable_http_proxy", 0),
        # GRPC_ADDRESS_HTTP_PROXY, which the option above does not cover: there is a proxy for none of the addresses.
        ("grpc.address_http_proxy_enabled_addresses", ""),
    ]
    return [
        *([] if enable_http_proxy else proxies),
        # Channels with equal arguments would share one connection, its throughput and its reconnect backoff.
        ("grpc.use_local_subchannel_pool", 1),
        # Despite its name, gRPC's limit for one connection attempt, handshakes included.
        ("grpc.min_reconnect_backoff_ms", _milliseconds(connect_timeout)),
        ("grpc.dns_ares_query_timeout", _milliseconds(connect_timeout)),
        ("grpc.initial_reconnect_backoff_ms", _INITIAL_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
        # A long prefill or a unary call is silent for minutes: pings detect a dead peer and keep NAT entries alive.
        ("grpc.keepalive_time_ms", _milliseconds(keepalive_time)),
        # The time for the answer to a ping. grpcio 1.74 to 1.85 uses it in place of the next one, with a default of 60 s.
        ("grpc.http2.ping_timeout_ms", _milliseconds(keepalive_timeout)),
        # Still the TCP user timeout of the socket, which detects data that is not acknowledged.
        ("grpc.keepalive_timeout_ms", _milliseconds(keepalive_timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
        # By default gRPC stops after two pings without data, and would no longer detect a dead peer.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_receive_message_bytes),
        ("grpc.max_send_message_length", max_send_message_bytes),
        # Retrying is up to the caller, who knows what a second generation costs.
        ("grpc.enable_retries", 0),
    ]


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, str | int]]
) -> grpc.aio.Channel:
    """Open a channel in the running event loop.

    Args:
        target: the server's address, from `grpc_target`.
        credentials: TLS credentials. None: plain text.
        options: channel arguments as name and value.

    Returns:
        The channel, which connects with its first call.

    """
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
