"""The state that the server's services share."""

from typing import Any

import grpc

from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.config import ServerConfig
from tokenwire_server.requests.incoming import IncomingRequest
from tokenwire_server.requests.server_state import ServerState
from tokenwire_server.requests.slow_readers import SlowReaders
from tokenwire_server.requests.trace_headers import trace_headers


class Host:
    """The server's options, its state and its watch of slow readers."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.state = ServerState()
        self.slow_readers = SlowReaders(config.slow_reader_timeout)

    def incoming(self, message: GenerationInput, context: grpc.aio.ServicerContext[Any, Any]) -> IncomingRequest:
        """Return the request of a call as an `IncomingRequest`, with the trace headers of the call's metadata."""
        return IncomingRequest(self.state, message, trace_headers=trace_headers(context.invocation_metadata()))
