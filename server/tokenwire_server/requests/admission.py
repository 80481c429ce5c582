"""Taking a request in: the same steps for every RPC."""

from tokenwire._contract import Reason
from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion import validation
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.engine.engine import Engine
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError, Violation
from tokenwire_server.requests.registry import LiveRequest, Registry


async def admit(
    engine: Engine,
    registry: Registry,
    caller: Caller,
    message: pb.GenerationInput,
    sink: Sink,
    *,
    stream: bool,
    path: str,
    max_message_bytes: int | None = None,
) -> LiveRequest:
    """Check a request, register it and hand it to the engine.

    Where that fails after another engine has done the prefill, the KV connector is told.

    Args:
        engine: the engine.
        registry: the registry of live requests.
        caller: who sends the request.
        message: the request.
        sink: where its outputs go.
        stream: whether outputs are wanted as they come, rather than all together.
        path: path of `message` in the request message, for errors.
        max_message_bytes: what one message may hold, where the prompt's log probabilities come in one; None where not.

    Returns:
        The registered request. Where an abort has asked to remember its id, its outcome is set already, and it is not
        in the engine: no output will come.

    Raises:
        RequestError: the request is refused, and nothing is left of it.

    """
    try:
        validation.check_input(message, path)
        # Before the conversion of a prompt, which may be long.
        engine.check_admission(number_of_sequences(message))
        seconds = None
        if message.HasField("max_time"):
            seconds = validation.positive_seconds(message.max_time, f"{path}.max_time")
        request = engine.request(message, message.request_id, stream=stream, path=path)
        if max_message_bytes is not None:
            _check_size(request, engine.limits.vocab_size, max_message_bytes, path)
        live = registry.open(caller, message.request_id, sink, f"{path}.request_id")
        if live.outcome is not None:
            return live
        request.request_id = live.engine_id
        if seconds is not None:
            registry.limit_time(live, seconds)
        try:
            await engine.add(request, sink, path)
        except BaseException:
            registry.drop(live)
            raise
        registry.added(live)
        return live
    finally:
        if not sink.internal_id:
            engine.release_remote_prefill(message)


def number_of_sequences(message: pb.GenerationInput) -> int:
    """Return a request's n."""
    return message.sampling_params.n if message.sampling_params.HasField("n") else 1


def _check_size(request: EngineRequest, vocab_size: int, max_bytes: int, path: str) -> None:
    """Refuse prompt log probabilities that could not be sent, before the engine computes them."""
    k = request.params.prompt_logprobs
    if k is None:
        return
    k = vocab_size if k < 0 else k
    # A value takes four bytes, an id or a rank at least one.
    size = (len(request.prompt_token_ids) - 1) * (k + 1) * 5
    if size > max_bytes:
        raise RequestError(
            Reason.MESSAGE_TOO_LARGE,
            f"{path}.sampling_params.prompt_logprobs: at least {size} bytes of log probabilities do not fit a message of"
            f" {max_bytes}; ask for fewer, use Multiplex, or start the server with --max-send-message-bytes",
            (Violation(f"{path}.sampling_params.prompt_logprobs", "asks for more than one message may hold"),),
        )
