"""W3C trace context from a call's metadata, where tracing libraries put it."""

from collections.abc import Iterable

_NAMES = frozenset({"traceparent", "tracestate", "baggage"})


def trace_headers(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the trace context of a call's metadata; empty if there is none."""
    return {key: value for key, value in metadata or () if key in _NAMES and isinstance(value, str)}
