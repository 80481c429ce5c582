"""A request between receipt of its message and its admission to the engine."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.requests.server_state import ServerState


class IncomingRequest:
    """A request as received; its block owns the request's remote prefill until the engine has the request.

    Another engine may have computed the prompt's KV blocks and hold them for this one. If the block exits before the
    engine has the request, for whatever reason, that engine is notified so that it can free them before their lease
    expires.
    """

    __slots__ = ("_state", "in_engine", "message", "path", "trace_headers")

    def __init__(
        self,
        state: ServerState,
        message: GenerationInput,
        *,
        path: str = "input",
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Take ownership of a request's message.

        Args:
            state: the server's state, which has the engine once it is loaded.
            message: the request.
            path: path of `message` in the request message, for errors.
            trace_headers: W3C trace context from the call's metadata; None if there is none.

        """
        self._state = state
        self.message = message
        self.path = path
        self.trace_headers = trace_headers
        self.in_engine = False
        """Whether the engine has the request, and so is responsible for the remote prefill."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        engine = self._state.engine
        if not self.in_engine and engine is not None:
            engine.release_remote_prefill(self.message)
