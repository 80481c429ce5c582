"""Calls with one request each: Generate and GenerateStream, and their equivalents in other protocols."""

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import grpc

from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server.access import caller
from tokenwire_server.conversion.outputs import Chunk, RequestEnd
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.errors import RequestError
from tokenwire_server.requests.admission import admit
from tokenwire_server.requests.incoming import IncomingRequest
from tokenwire_server.requests.slow_readers import Reader
from tokenwire_server.services.call_sink import CallSink
from tokenwire_server.services.host import Host
from tokenwire_server.transport.handlers import ResponseWriter

if TYPE_CHECKING:
    from tokenwire_server.requests.live_request import LiveRequest
    from tokenwire_server.requests.server_state import Serving


class Answer(Protocol):
    """Converts the engine's outputs to a stream's responses."""

    @property
    def done(self) -> bool:
        """Whether the stream is complete even though the engine has not ended the request."""

    def take(self, chunk: Chunk) -> Iterable[Any]:
        """Return the responses for the next output of the engine."""


class Call:
    """A call with one request. On exit of its block the request is unregistered, and aborted unless it has ended."""

    def __init__(self, host: Host, context: grpc.aio.ServicerContext[Any, Any], *, stream: bool) -> None:
        """Make a call; `start` admits its request.

        Args:
            host: the state that the server's services share.
            context: the call.
            stream: whether outputs are read as they are generated, rather than all at once.

        """
        self._host = host
        self._context = context
        self._stream = stream
        self._sink = CallSink(stream=stream)
        self._serving: Serving | None = None
        self._live: LiveRequest | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._unregister()

    async def start(self, incoming: IncomingRequest) -> EngineRequest:
        """Admit the request.

        Returns:
            The converted request.

        Raises:
            RequestError: the request is refused.

        """
        self._serving = self._host.state.accepting()
        self._live = await admit(
            self._serving,
            incoming,
            caller.of(self._context),
            self._sink,
            stream=self._stream,
            max_message_bytes=self._host.config.max_send_message_bytes,
        )
        return self._live.request

    async def next(self) -> Chunk:
        """Wait for the next output.

        Returns:
            The output. One with `request_end` is the last.

        Raises:
            RequestError: the request has failed.

        """
        live, serving = self._live, self._serving
        assert live is not None
        assert serving is not None
        if not self._sink.internal_id:
            return _aborted_on_arrival(live.request)
        chunk = await self._sink.next()
        if chunk.request_end is not None:
            # Before the caller is notified, so that it can reuse the id immediately.
            serving.registry.finish(live)
        return chunk

    async def respond(self, answer: Answer) -> None:
        """Write a stream's responses until the request ends.

        Raises:
            RequestError: the request has failed, or the caller reads too slowly.

        """
        writer = ResponseWriter(self._context)
        with self._host.slow_readers.watch(_CallReader(self, self._sink, writer)):
            finished = False
            while not finished:
                chunk = await self.next()
                finished = chunk.request_end is not None
                for response in answer.take(chunk):
                    await writer.write(response)
                finished = finished or answer.done

    def cached_tokens(self, index: int) -> int | None:
        """Return the number of cached prompt tokens of a running sequence; None if not known."""
        assert self._serving is not None
        return self._serving.engine.cached_tokens(self._sink.internal_id, index)

    def give_up(self, error: RequestError) -> None:
        """Abort the request and fail the call with an error."""
        self._unregister()
        self._sink.discard(error)

    def _unregister(self) -> None:
        if self._live is not None and self._serving is not None:
            self._serving.registry.unregister(self._live)


class _CallReader(Reader):
    """The reader of a call with one request."""

    __slots__ = ("_call", "_sink", "_writer")

    def __init__(self, call: Call, sink: CallSink, writer: ResponseWriter) -> None:
        """Make a reader.

        Args:
            call: the call.
            sink: holds the outputs that have not been read.
            writer: writes the call's responses.

        """
        self._call = call
        self._sink = sink
        self._writer = writer

    def blocked_since(self) -> float | None:
        return self._writer.blocked_since

    def waiting(self) -> int:
        return self._sink.waiting()

    def give_up(self, error: RequestError) -> None:
        self._call.give_up(error)


def _aborted_on_arrival(request: EngineRequest) -> Chunk:
    """Return the only output of a request whose id an Abort asked to remember."""
    outputs = [pb.SequenceOutput(index=i, finish_reason=pb.FINISH_REASON_ABORT) for i in range(request.params.n)]
    if request.params.num_logprobs is not None:
        for output in outputs:
            output.logprobs.SetInParent()
            output.logprobs.top_k = request.num_top_tokens
    return Chunk(outputs, RequestEnd())
