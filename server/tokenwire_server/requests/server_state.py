"""The server's state: one enum, the table of its transitions, and what is refused in each state."""

import enum
import logging
from collections.abc import Callable
from typing import NamedTuple

from tokenwire._contract import Reason
from tokenwire.v1.engine_load_pb2 import EngineLoad
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError, engine_dead
from tokenwire_server.requests.registry import Registry

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """State of the server. Health reports SERVING in SERVING alone."""

    LOADING = "loading"
    """The engine is being loaded; nothing is answered yet."""
    SERVING = "serving"
    """Requests are admitted."""
    DRAINING = "draining"
    """The server is shutting down: requests in flight continue, new ones are refused."""
    DEAD = "dead"
    """The engine has died; everything is refused."""


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
"""Why a new request is refused in each state but SERVING."""


class Serving(NamedTuple):
    """What answers requests, once the engine is loaded."""

    engine: Engine
    registry: Registry

    def load(self) -> EngineLoad:
        """Return the current load."""
        load = self.engine.load()
        load.num_live_requests = len(self.registry)
        return load


class ServerState:
    """The state of the server, as its services see it."""

    def __init__(self) -> None:
        self.current = State.LOADING
        self._serving: Serving | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine; None while it is being loaded."""
        return None if self._serving is None else self._serving.engine

    def serve(self, engine: Engine, registry: Registry) -> None:
        """Enter SERVING with a loaded engine."""
        self._serving = Serving(engine, registry)
        self.enter(State.SERVING)

    def enter(self, state: State) -> None:
        """Change the state.

        Raises:
            ValueError: there is no such transition.

        """
        if state not in _TRANSITIONS[self.current]:
            raise ValueError(f"the server cannot go from {self.current.name} to {state.name}")
        logger.info("%s -> %s", self.current.value, state.value)
        self.current = state

    def ready(self) -> Serving:
        """Return what answers questions about the engine and its requests.

        Raises:
            RequestError: the engine is still loading, ENGINE_LOADING, or has died, ENGINE_DEAD.

        """
        if self._serving is None or self.current is State.DEAD:
            raise self._refusal()
        return self._serving

    def accepting(self) -> Serving:
        """Return what admits a new request.

        Raises:
            RequestError: as `ready`, or the server is shutting down, DRAINING.

        """
        if self._serving is None or self.current is not State.SERVING:
            raise self._refusal()
        self._serving.engine.check_alive()
        return self._serving

    def _refusal(self) -> RequestError:
        return _REFUSALS[self.current]()
