"""The methods of `vllm.grpc.engine.VllmEngine`: thin, each lists the steps of a call in order."""

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer as Base
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server import errors
from tokenwire_server.access import caller
from tokenwire_server.conversion.abort import check_abort
from tokenwire_server.errors import RequestError
from tokenwire_server.services.call import Call
from tokenwire_server.services.host import Host
from tokenwire_server.services.smg import info, stop_strings
from tokenwire_server.services.smg.faults import renamed
from tokenwire_server.services.smg.loads import Loads
from tokenwire_server.services.smg.request import fill
from tokenwire_server.services.smg.responses import Answer
from tokenwire_server.services.smg.stop_strings import StopStrings
from tokenwire_server.services.smg.tokenizer import ModelTokenizer
from tokenwire_server.transport.server import Service

_SERVICE_NAME = smg.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_CHUNK_BYTES = 64 * 1024
"""Maximum bytes of the tokenizer archive in one message."""

_Context = grpc.aio.ServicerContext[Any, Any]


def _unsupported(method: str, instead: str) -> Callable[[Any, Any, _Context], Awaitable[None]]:
    async def refuse(_self: Any, _request: Any, context: _Context) -> None:
        async with errors.boundary(context, method):
            raise RequestError(Reason.UNSUPPORTED_METHOD, f"{method} is not served: {instead}")

    return refuse


class VllmEngineServicer(Base):  # type: ignore[misc]  # it has no types
    """Implements `vllm.grpc.engine.VllmEngine` by converting each request to a GenerationInput."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._state = host.state
        self._start = time.monotonic()
        self._loads = Loads()
        self._tokenizer: ModelTokenizer | None = None

    async def Generate(self, request: Any, context: _Context) -> None:
        """Generate completions for a prompt; respond as tokens are generated, or at the end of each sequence."""
        async with errors.boundary(context, "Generate"):
            with renamed():
                # The engine does not support stop strings; they are detected in the tokens as they are generated.
                stream = request.stream or bool(request.sampling_params.stop)
                with Call(self._host, context, stream=stream) as call:
                    with self._host.incoming(GenerationInput(), context) as incoming:
                        fill(incoming.message, request)
                        stops = await self._stop_strings(incoming.message, request)
                        converted = await call.start(incoming)
                    await call.respond(Answer(request, converted.params.n, stops, call.cached_tokens))

    async def Abort(self, request: Any, context: _Context) -> Any:
        """Abort requests by their ids, and respond once they have been aborted."""
        async with errors.boundary(context, "Abort"):
            check_abort(engine_service_pb2.AbortRequest(request_ids=request.request_ids))
            _ = await self._state.ready().registry.abort(caller.of(context), request.request_ids, None)
            return smg.AbortResponse()

    async def HealthCheck(self, request: Any, context: _Context) -> Any:  # noqa: ARG002  # the methods' form
        """Return whether the server is accepting requests."""
        try:
            self._state.accepting()
        except RequestError as error:
            return smg.HealthCheckResponse(healthy=False, message=error.message)
        return smg.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(self, request: Any, context: _Context) -> Any:  # noqa: ARG002  # the methods' form
        """Return the model's properties."""
        async with errors.boundary(context, "GetModelInfo"):
            engine = self._state.ready().engine
            return info.model_info(engine.info(), engine.model_info, engine.limits)

    async def GetServerInfo(self, request: Any, context: _Context) -> Any:  # noqa: ARG002  # the methods' form
        """Return the server's properties and uptime."""
        async with errors.boundary(context, "GetServerInfo"):
            engine, registry = self._state.ready()
            return info.server_info(
                engine.info(),
                engine.model_info,
                num_live_requests=len(registry),
                uptime_seconds=time.monotonic() - self._start,
            )

    async def GetLoads(self, request: Any, context: _Context) -> Any:
        """Return the current load of the engine."""
        async with errors.boundary(context, "GetLoads"):
            serving = self._state.ready()
            rank = request.dp_rank if request.HasField("dp_rank") else None
            return self._loads.response(serving.engine.info(), serving.load(), rank)

    async def GetTokenizer(self, request: Any, context: _Context) -> AsyncIterator[Any]:  # noqa: ARG002  # as above
        """Stream the tokenizer's files as a ZIP archive; the last chunk contains the archive's SHA-256."""
        async with errors.boundary(context, "GetTokenizer"):
            archive = await self._model_tokenizer().archive()
            digest = hashlib.sha256(archive).hexdigest()
            for start in range(0, len(archive), _CHUNK_BYTES):
                end = start + _CHUNK_BYTES
                yield common_pb2.GetTokenizerChunk(
                    data=archive[start:end], sha256=digest if end >= len(archive) else ""
                )

    Embed = _unsupported("Embed", "this server only generates")
    FlushCache = _unsupported("FlushCache", "the prefix cache cannot be reset through this API")
    StartProfile = _unsupported("StartProfile", "the profiler cannot be controlled through this API")
    StopProfile = _unsupported("StopProfile", "the profiler cannot be controlled through this API")
    SubscribeKvEvents = _unsupported(
        "SubscribeKvEvents", "subscribe to the engine's own publisher (--kv-events-config)"
    )

    async def _stop_strings(self, message: GenerationInput, request: Any) -> StopStrings | None:
        if not request.sampling_params.stop:
            return None
        stop_strings.check(request.sampling_params)
        tokenizer = await self._model_tokenizer().load()
        return StopStrings(tokenizer, message.prompt_token_ids, request.sampling_params)

    def _model_tokenizer(self) -> ModelTokenizer:
        if self._tokenizer is None:
            model = self._state.ready().engine.model_info
            self._tokenizer = ModelTokenizer(model.tokenizer, model.tokenizer_revision)
        return self._tokenizer


def service(host: Host) -> Service:
    """Return the service, to register with the server's transport."""
    servicer = VllmEngineServicer(host)
    return Service(_SERVICE_NAME, lambda server: add_VllmEngineServicer_to_server(servicer, server))
