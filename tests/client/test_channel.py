import importlib.util
from pathlib import Path

from tokenwire._channel import channel_options


def test_grpc_knows_every_option() -> None:
    """gRPC ignores unknown names silently, so a typo would disable a protection."""
    spec = importlib.util.find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).read_bytes()
    missing = [name for name, _ in channel_options() if name.encode() + b"\0" not in library]
    assert not missing


def test_times_are_milliseconds() -> None:
    options = dict(channel_options(connect_timeout=1.5, keepalive_time=2, keepalive_timeout=0.0001))
    assert options["grpc.min_reconnect_backoff_ms"] == 1500
    assert options["grpc.keepalive_time_ms"] == 2000
    assert options["grpc.keepalive_timeout_ms"] == 1
