"""Where requests come in, by whichever service: whether the server takes them, and their calls."""

from typing import NamedTuple

from tokenwire._contract import Reason
from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1.engine_load_pb2 import EngineLoad
from tokenwire_server import errors
from tokenwire_server.config import ServerConfig
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError
from tokenwire_server.requests.registry import Registry
from tokenwire_server.requests.slow_readers import SlowReaders


class Serving(NamedTuple):
    """What answers requests, once the engine has loaded."""

    engine: Engine
    registry: Registry

    def load(self) -> EngineLoad:
        """Say how busy the server is."""
        load = self.engine.load()
        load.num_live_requests = len(self.registry)
        return load


class Reception:
    """The state of the server as its services see it: loading, serving, draining, or without an engine."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.slow_readers = SlowReaders(config.slow_reader_timeout)
        self._serving: Serving | None = None
        self._draining = False
        self._dead = False

    def serve(self, engine: Engine, registry: Registry) -> None:
        """Take requests from now on."""
        self._serving = Serving(engine, registry)

    def engine_died(self) -> None:
        """Refuse everything from now on: there is no engine."""
        self._dead = True

    def refuse_new(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._draining = True

    def ready(self) -> Serving:
        """Return what answers questions.

        Raises:
            RequestError: the engine is still loading, ENGINE_LOADING, or has died, ENGINE_DEAD.

        """
        if self._dead:
            raise errors.engine_dead()
        if self._serving is None:
            raise RequestError(Reason.ENGINE_LOADING, "the engine is still loading; health tells when it is ready")
        return self._serving

    def accepting(self) -> Serving:
        """Return what takes a new request.

        Raises:
            RequestError: as `ready`, and DRAINING.

        """
        if self._draining:
            raise RequestError(Reason.DRAINING, "the server is shutting down; send the request to another one")
        serving = self.ready()
        serving.engine.check_alive()
        return serving

    def release(self, message: pb.GenerationInput) -> None:
        """Let go of what another engine has computed for a request that is refused."""
        if self._serving is not None:
            self._serving.engine.release_remote_prefill(message)
