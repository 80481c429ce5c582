"""The server's state: the states, their transitions, and how each refuses new requests."""

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenwire._contract import Reason
from tokenwire.v1.engine_load_pb2 import EngineLoad
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError, engine_dead
from tokenwire_server.requests.registry import Registry

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """State of the server. The health service reports SERVING in state SERVING only."""

    LOADING = "loading"
    """The engine is being loaded; all requests are refused."""
    SERVING = "serving"
    """Requests are admitted."""
    DRAINING = "draining"
    """The server is shutting down: requests in flight continue, new ones are refused."""
    DEAD = "dead"
    """The engine has died; all requests are refused."""


_TRANSITIONS: dict[State, frozenset[State]] = {
    State.LOADING: frozenset({State.SERVING}),
    State.SERVING: frozenset({State.DRAINING, State.DEAD}),
    State.DRAINING: frozenset({State.DEAD}),
    State.DEAD: frozenset(),
}
_REFUSALS: dict[State, Callable[[], RequestError]] = {
    State.LOADING: lambda: RequestError(
        Reason.ENGINE_LOADING, "the engine is still loading; wait until health is SERVING"
    ),
    State.DRAINING: lambda: RequestError(
        Reason.DRAINING, "the server is shutting down; send the request to another server"
    ),
    State.DEAD: engine_dead,
}
"""The error that refuses a new request, in each state except SERVING."""


class Serving(NamedTuple):
    """The engine and the registry, once the engine is loaded."""

    engine: Engine
    registry: Registry

    def load(self) -> EngineLoad:
        """Return the current load."""
        load = self.engine.load()
        load.num_live_requests = len(self.registry)
        return load


class ServerState:
    """The current state of the server, shared by its services."""

    def __init__(self) -> None:
        self.current = State.LOADING
        self._serving: Serving | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def engine(self) -> Engine | None:
        """The engine; None while it is being loaded."""
        return None if self._serving is None else self._serving.engine

    def serve(self, engine: Engine, registry: Registry) -> None:
        """Enter SERVING with an engine that has been loaded."""
        self._serving = Serving(engine, registry)
        self.enter(State.SERVING)

    def enter(self, state: State) -> None:
        """Enter a state.

        Raises:
            ValueError: the transition is not allowed.

        """
        if state not in _TRANSITIONS[self.current]:
            raise ValueError(f"the server cannot go from {self.current.name} to {state.name}")
        logger.info("%s -> %s", self.current.value, state.value)
        self.current = state
        for listener in list(self._listeners):
            listener()

    @contextlib.contextmanager
    def notify(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call a function at every change of the state inside the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def refusal(self) -> RequestError | None:
        """Return why new requests are refused in the current state; None if they are accepted."""
        return _REFUSALS[self.current]() if self.current in _REFUSALS else None

    def ready(self) -> Serving:
        """Return the engine and the registry, for a call about the engine or its requests.

        Raises:
            RequestError: ENGINE_LOADING if the engine is still loading, ENGINE_DEAD if it has died.

        """
        if self._serving is None or self.current is State.DEAD:
            raise _REFUSALS[self.current]()  # noqa: RSE102  # a function that makes the error
        return self._serving

    def accepting(self) -> Serving:
        """Return the engine and the registry, for a new request.

        Raises:
            RequestError: as `ready`, or DRAINING if the server is shutting down.

        """
        if self._serving is None or self.current is not State.SERVING:
            raise _REFUSALS[self.current]()  # noqa: RSE102  # as above
        self._serving.engine.check_alive()
        return self._serving
