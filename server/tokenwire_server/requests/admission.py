"""Admission of requests, in the same three steps for every RPC."""

import uuid

from tokenwire._contract import Reason
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.conversion.request import EngineRequest, check_input, number_of_sequences
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError, Violation
from tokenwire_server.requests.incoming import IncomingRequest
from tokenwire_server.requests.live_request import LiveRequest
from tokenwire_server.requests.server_state import Serving

_LOGPROB_BYTES = 5
"""Minimum bytes of a log probability with its token id or rank on the wire: a float32, and a varint of one byte."""
_FLOAT_BYTES = 4
"""Bytes of a float32 on the wire."""


async def admit(
    serving: Serving,
    incoming: IncomingRequest,
    caller: Caller,
    sink: Sink,
    *,
    stream: bool,
    max_message_bytes: int,
) -> LiveRequest:
    """Check a request, convert it, register it and add it to the engine.

    Args:
        serving: the engine and the registry.
        incoming: the request as received.
        caller: the caller of the RPC.
        sink: receives the request's outputs.
        stream: whether the caller receives outputs as they are generated, rather than all at once.
        max_message_bytes: maximum size of a sent message, which is also that of the log probabilities in memory for one
            request.

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


def convert(serving: Serving, incoming: IncomingRequest, *, stream: bool, max_message_bytes: int) -> EngineRequest:
    """Convert a request, with its id and its trace headers; its message is not read after this.

    Args:
        serving: the engine and the registry.
        incoming: the request as received.
        stream: whether the caller receives outputs as they are generated, rather than all at once.
        max_message_bytes: maximum size of a sent message, which is also that of the log probabilities in memory for one
            request.

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
    _check_size(request, engine.limits, max_message_bytes, path, stream=stream)
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


def _check_size(request: EngineRequest, limits: RequestLimits, max_bytes: int, path: str, *, stream: bool) -> None:
    """Refuse log probabilities that could exceed the message size limit, before the engine computes them.

    The limit holds for what is in memory at the same time: all of the prompt's, and all of the output's unless it is
    streamed. It also holds where they are sent in parts, since the engine returns those of the prompt at once.
    """
    params, prompt_positions = request.params, len(request.prompt_token_ids) - 1
    sizes: dict[str, int] = {}
    if params.prompt_logprobs is not None:
        k = limits.vocab_size if params.prompt_logprobs < 0 else params.prompt_logprobs
        sizes["prompt_logprobs"] = prompt_positions * (k + 1) * _LOGPROB_BYTES
    if params.prompt_logprob_token_ids is not None:
        sizes["prompt_logprob_token_ids"] = params.prompt_logprob_token_ids.size * _FLOAT_BYTES
    if params.num_logprobs is not None:
        name = "logprob_token_ids" if params.logprobs is None else "logprobs"
        tokens = params.max_tokens
        if stream:
            tokens = min(tokens, max(params.stream_interval or 1, limits.stream_interval))
        sizes[name] = tokens * (request.num_top_tokens + 1) * _LOGPROB_BYTES
    size = params.n * sum(sizes.values())
    if size > max_bytes:
        field = f"{path}.sampling_params.{max(sizes, key=lambda name: sizes[name])}"
        raise RequestError(
            Reason.MESSAGE_TOO_LARGE,
            f"{field}: the request can return {size} bytes of log probabilities, more than the maximum message size,"
            f" {max_bytes} bytes; request fewer, lower max_tokens or n, or raise --max-send-message-bytes",
            (Violation(field, "can exceed the maximum message size"),),
        )
