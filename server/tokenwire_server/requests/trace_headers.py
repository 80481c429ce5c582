"""Trace context in a call's metadata, for callers whose tracing library puts it there."""

from collections.abc import AsyncIterator, Iterable

from tokenwire.v1.engine_service_pb2 import MultiplexRequest
from tokenwire.v1.generation_pb2 import GenerationInput

_NAMES = frozenset({"traceparent", "tracestate", "baggage"})

Metadata = Iterable[tuple[str, str | bytes]]


def fill(message: GenerationInput, metadata: Metadata | None) -> None:
    """Write the W3C trace headers of a call's metadata into a request that has none of its own."""
    if metadata and not message.trace_headers:
        message.trace_headers.update(_headers(metadata))


def fill_submits(
    actions: AsyncIterator[MultiplexRequest], metadata: Metadata | None
) -> AsyncIterator[MultiplexRequest]:
    """Do the same for the requests of a Multiplex stream."""
    headers = _headers(metadata or ())
    return _fill_each(actions, headers) if headers else actions


async def _fill_each(
    actions: AsyncIterator[MultiplexRequest], headers: dict[str, str]
) -> AsyncIterator[MultiplexRequest]:
    async for action in actions:
        if action.HasField("submit") and action.submit.HasField("input") and not action.submit.input.trace_headers:
            action.submit.input.trace_headers.update(headers)
        yield action


def _headers(metadata: Metadata) -> dict[str, str]:
    return {key: value for key, value in metadata if key in _NAMES and isinstance(value, str)}
