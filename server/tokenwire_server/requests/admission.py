"""Admission: the same three steps for a request of every RPC."""

import uuid

from tokenwire._contract import Reason
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion.request import EngineRequest, check_input, number_of_sequences
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError, Violation
from tokenwire_server.requests.incoming import IncomingRequest
from tokenwire_server.requests.live_request import LiveRequest
from tokenwire_server.requests.server_state import Serving


async def admit(
    serving: Serving,
    incoming: IncomingRequest,
    caller: Caller,
    sink: Sink,
    *,
    stream: bool,
    max_message_bytes: int | None = None,
) -> LiveRequest:
    """Check a request, convert it, register it and add it to the engine.

    Args:
        serving: the engine and the registry of live requests.
        incoming: the request as it arrived.
        caller: who sends it.
        sink: where its outputs go.
        stream: whether the caller wants outputs as they come, rather than all at once.
        max_message_bytes: size limit of the message that carries all log probabilities of the prompt; None if they are
            sent in parts.

    Returns:
        The live request. If an Abort asked to remember its id, its outcome is set already and it is not in the engine: no
        output will come.

    Raises:
        RequestError: the request is refused, and nothing is left of it.

    """
    check_before_conversion(serving, incoming, caller)
    request = convert(serving, incoming, stream=stream, max_message_bytes=max_message_bytes)
    return await register_and_add(serving, incoming, caller, request, sink)


def check_before_conversion(serving: Serving, incoming: IncomingRequest, caller: Caller) -> None:
    """Refuse what can be refused before the prompt is converted, which may be long."""
    message, path = incoming.message, incoming.path
    check_input(message, path)
    serving.registry.check(caller, message.request_id, f"{path}.request_id")
    serving.engine.check_admission(number_of_sequences(message))


def convert(
    serving: Serving, incoming: IncomingRequest, *, stream: bool, max_message_bytes: int | None
) -> EngineRequest:
    """Convert a request, with its id and its trace headers; after this nothing reads the message any more."""
    engine, path = serving.engine, incoming.path
    request = engine.convert(
        incoming.message,
        request_id=incoming.message.request_id or uuid.uuid4().hex,
        trace_headers=incoming.trace_headers,
        stream=stream,
        path=path,
    )
    if max_message_bytes is not None:
        _check_size(request, engine.limits.vocab_size, max_message_bytes, path)
    return request


async def register_and_add(
    serving: Serving, incoming: IncomingRequest, caller: Caller, request: EngineRequest, sink: Sink
) -> LiveRequest:
    """Register a request and add it to the engine; if that fails, nothing is left of it in either."""
    engine, registry = serving
    live = registry.register(caller, request, sink, f"{incoming.path}.request_id")
    if live.outcome is not None:
        return live
    try:
        await engine.add(request, sink, engine_id=live.engine_id, path=incoming.path)
    except RequestError:
        registry.withdraw(live)
        raise
    except BaseException:
        registry.unregister(live)
        raise
    finally:
        if sink.internal_id:
            incoming.in_engine = True
    registry.added(live)
    return live


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
