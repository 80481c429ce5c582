"""A request with a call of its own: Generate and GenerateStream."""

from types import TracebackType
from typing import Any, Self

import grpc

from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server.access import caller
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion.outputs import Chunk, Closing
from tokenwire_server.engine.engine import Engine
from tokenwire_server.engine.sink import CallSink
from tokenwire_server.errors import RequestError
from tokenwire_server.requests import trace_headers
from tokenwire_server.requests.admission import admit, number_of_sequences
from tokenwire_server.requests.reception import Reception
from tokenwire_server.requests.registry import LiveRequest, Registry
from tokenwire_server.requests.slow_readers import Reader


def open_call(
    reception: Reception, message: pb.GenerationInput, context: grpc.aio.ServicerContext[Any, Any], *, stream: bool
) -> "Call":
    """Return the call of a request, which its block starts.

    Args:
        reception: where requests come in.
        message: the request; trace headers of the call's metadata are added to it.
        context: the call.
        stream: whether outputs are wanted as they come, rather than all together.

    Raises:
        RequestError: no requests are taken.

    """
    trace_headers.fill(message, context.invocation_metadata())
    try:
        serving = reception.accepting()
    except RequestError:
        reception.release(message)
        raise
    return Call(
        serving.engine,
        serving.registry,
        caller.of(context),
        message,
        stream=stream,
        max_message_bytes=reception.config.max_send_message_bytes,
    )


class Call(Reader):
    """A request's call. Leaving its block lets go of the request, in the engine too, however the block is left.

    `start` admits the request; `next` then returns its outputs, up to the one with `closing`.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        caller: Caller,
        message: pb.GenerationInput,
        *,
        stream: bool,
        max_message_bytes: int,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._registry = registry
        self._caller = caller
        self._message = message
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._sink = CallSink(stream=stream)
        self._live: LiveRequest | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._registry.drop(self._live)

    async def start(self) -> str:
        """Admit the request and return its id.

        Raises:
            RequestError: the request is refused.

        """
        self._live = await admit(
            self._engine,
            self._registry,
            self._caller,
            self._message,
            self._sink,
            stream=self._stream,
            path="input",
            max_message_bytes=self._max_message_bytes,
        )
        return self._live.request_id

    async def next(self) -> Chunk:
        """Wait for the next output.

        Raises:
            RequestError: the request has failed.

        """
        live = self._live
        assert live is not None
        if not self._sink.internal_id:
            return self._ended_on_arrival()
        chunk = await self._sink.next()
        if chunk.closing is not None:
            # Before the caller is told, so that it may use the id again at once.
            self._registry.finish(live, chunk.outputs)
        return chunk

    def cached_tokens(self, index: int) -> int | None:
        """Return how many prompt tokens a running sequence found in the prefix cache; None where that is not known."""
        return self._engine.cached_tokens(self._sink.internal_id, index)

    def waiting(self) -> int:
        """Return the number of values that wait to be written."""
        return self._sink.waiting()

    def give_up(self, error: RequestError) -> None:
        """Let go of the request and fail with the error."""
        if self._live is not None:
            self._registry.drop(self._live)
        self._sink.discard(error)

    def _ended_on_arrival(self) -> Chunk:
        # An abort has asked to remember this id.
        outputs = [
            pb.SequenceOutput(index=i, finish_reason=pb.FINISH_REASON_ABORT)
            for i in range(number_of_sequences(self._message))
        ]
        return Chunk(outputs, Closing())
