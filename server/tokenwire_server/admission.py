"""Taking a request in: the same steps for every RPC."""

from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server import validation
from tokenwire_server.engine.engine import Engine
from tokenwire_server.engine.sink import Sink
from tokenwire_server.registry import LiveRequest, Registry


async def admit(
    engine: Engine, registry: Registry, message: pb.GenerationInput, sink: Sink, *, stream: bool, path: str
) -> LiveRequest:
    """Check a request, register it and hand it to the engine.

    Args:
        engine: the engine.
        registry: the registry of live requests.
        message: the request.
        sink: where its outputs go.
        stream: whether outputs are wanted as they come, rather than all together.
        path: path of `message` in the request message, for errors.

    Returns:
        The registered request. Where an abort has asked to remember its id, its outcome is set already, and it is not
        in the engine: no output will come.

    Raises:
        RequestError: the request is refused, and nothing is left of it.

    """
    validation.check_input(message, path)
    seconds = None
    if message.HasField("max_time"):
        seconds = validation.positive_seconds(message.max_time, f"{path}.max_time")
    request = engine.request(message, message.request_id, stream=stream, path=path)
    live = registry.open(message.request_id, sink, f"{path}.request_id")
    if live.outcome is not None:
        return live
    request.request_id = live.request_id
    if seconds is not None:
        registry.limit_time(live, seconds)
    try:
        await engine.add(request, sink, path)
    except BaseException:
        registry.drop(live)
        raise
    registry.added(live)
    return live


def number_of_sequences(message: pb.GenerationInput) -> int:
    """Return a request's n."""
    return message.sampling_params.n if message.sampling_params.HasField("n") else 1
