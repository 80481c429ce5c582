"""The stream of one request's deltas, which aborts the request when it is no longer read."""

from tokenwire._call_stream import CallStream
from tokenwire._connection import Connection, Metadata
from tokenwire._results import Delta
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput


class AsyncDeltaStream(CallStream[Delta]):
    """Iterates over the deltas of one request. Leaving it early aborts the request on the server.

    Leaving the stream's `async with` block in any way cancels the call, and the server aborts the request. So do
    `aclose()`, an error, and cancelling the task that reads. A bare `async for` that is left by `break` or an exception
    cancels the call only when the stream object is garbage-collected: in CPython at once, unless a variable or a stored
    traceback still refers to it.

    The request starts with the call of `stream`, not with the first read. Only one task may read at a time.
    """

    def __init__(
        self,
        connection: Connection,
        generation_input: GenerationInput,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> None:
        """Start a request.

        Args:
            connection: the connection to the server.
            generation_input: the request.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of the call, sent after the client's own. None: nothing is added.

        Raises:
            ClientClosedError: the client is closed.
            InvalidArgumentError: the metadata cannot be sent.

        """
        self.request_id = generation_input.request_id
        """The request's id, for `abort`."""
        request = pb.GenerateStreamRequest(input=generation_input)
        super().__init__(connection, connection.start(connection.stub.GenerateStream, request, timeout, metadata))

    def _convert(self, message: pb.GenerateStreamResponse) -> Delta:
        return Delta.from_proto(message, self.request_id)
