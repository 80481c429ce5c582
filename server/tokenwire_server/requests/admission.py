"""Admission of requests, in the same three steps for every RPC."""

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
        serving: the engine and the registry.
        incoming: the request as received.
        caller: the caller of the RPC.
        sink: receives the request's outputs.
        stream: whether the caller receives outputs as they are generated, rather than all at once.
        max_message_bytes: maximum size of the message that carries all prompt log probabilities; None if they are sent
            in parts.

    Returns:
        The live request. If an earlier Abort asked to remember its id, its outcome is already set, and it has no
        outputs because it is not added to the engine.

    Raises:
        RequestError: the request is refused; it is neither registered nor in the engine.

    """
    check_before_conversion(serving, incoming, caller)
    request = convert(serving, incoming, stream=stream, max_message_bytes=max_message_bytes)
    return await register_and_add(serving, incoming, caller, request, sink)


def check_before_conversion(serving: Serving, incoming: IncomingRequest, caller: Caller) -> None:
    """Run the checks that do not need the converted prompt, which may be long.

    Args:
        serving: the engine and the registry.
        incoming: the request as received.
        caller: the caller of the RPC.

    Raises:
        RequestError: the request is refused.

    """
    message, path = incoming.message, incoming.path
    check_input(message, path)
    serving.registry.check(caller, message.request_id, f"{path}.request_id")
    serving.engine.check_admission(number_of_sequences(message))


def convert(
    serving: Serving, incoming: IncomingRequest, *, stream: bool, max_message_bytes: int | None
) -> EngineRequest:
    """Convert a request, with its id and its trace headers; its message is not read after this.

    Args:
        serving: the engine and the registry.
        incoming: the request as received.
        stream: whether the caller receives outputs as they are generated, rather than all at once.
        max_message_bytes: maximum size of the message that carries all prompt log probabilities; None if they are sent
            in parts.

    Returns:
        The request in vLLM's terms.

    Raises:
        RequestError: the request is refused.

    """
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
    """Register a request and add it to the engine; if that fails, it is removed from both.

    Args:
        serving: the engine and the registry.
        incoming: the request as received.
        caller: the caller of the RPC.
        request: the request, from `convert`.
        sink: receives the request's outputs.

    Returns:
        The live request. If an earlier Abort asked to remember its id, its outcome is already set, and it is not added
        to the engine.

    Raises:
        RequestError: the registry or the engine refuses the request, or the engine has died.

    """
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
    """Refuse prompt log probabilities that exceed the message size limit, before the engine computes them."""
    k = request.params.prompt_logprobs
    if k is None:
        return
    k = vocab_size if k < 0 else k
    # On the wire, a log probability takes four bytes, and an id or a rank at least one.
    size = (len(request.prompt_token_ids) - 1) * (k + 1) * 5
    if size > max_bytes:
        raise RequestError(
            Reason.MESSAGE_TOO_LARGE,
            f"{path}.sampling_params.prompt_logprobs: at least {size} bytes of log probabilities exceed the maximum"
            f" message size, {max_bytes} bytes; request fewer, use Multiplex, or raise --max-send-message-bytes",
            (Violation(f"{path}.sampling_params.prompt_logprobs", "exceeds the maximum message size"),),
        )
