"""The methods of `tokenwire.v1.EngineService`: thin, each lists the steps of a call in order."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from tokenwire_server import errors
from tokenwire_server.access import caller
from tokenwire_server.conversion.abort import check_abort
from tokenwire_server.requests.incoming import IncomingRequest
from tokenwire_server.services import responses
from tokenwire_server.services.call import Call
from tokenwire_server.services.host import Host
from tokenwire_server.services.multiplex.stream import MultiplexStream
from tokenwire_server.transport.server import Service

_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EngineService"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(EngineServiceServicer):
    """Implements `tokenwire.v1.EngineService`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._state = host.state

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> pb.GenerateResponse:
        """Generate a completion for a prompt and return it in one response."""
        async with errors.boundary(context, "Generate"):
            with Call(self._host, context, stream=False) as call:
                with self._incoming(request, context) as incoming:
                    converted = await call.start(incoming)
                return responses.unary(converted, await call.next())

    # A coroutine that writes its responses costs less than a generator; the stubs are typed for a generator.
    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: _Context) -> None:  # type: ignore[override]
        """Generate a completion for a prompt and stream it as tokens are generated."""
        async with errors.boundary(context, "GenerateStream"):
            with Call(self._host, context, stream=True) as call:
                with self._incoming(request, context) as incoming:
                    converted = await call.start(incoming)
                await call.respond(responses.StreamAnswer(converted))

    async def Multiplex(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.MultiplexRequest], context: _Context
    ) -> None:
        """Serve many requests on one stream."""
        async with errors.boundary(context, "Multiplex"):
            await MultiplexStream(self._host, context).run(request_iterator)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Abort requests by their ids."""
        async with errors.boundary(context, "Abort"):
            remember_seconds = check_abort(request)
            registry = self._state.ready().registry
            outcomes = await registry.abort(caller.of(context), request.request_ids, remember_seconds)
            response = pb.AbortResponse()
            for request_id, outcome in zip(request.request_ids, outcomes, strict=True):
                response.results.add(request_id=request_id, outcome=outcome)
            return response

    async def GetEngineInfo(
        self,
        request: pb.GetEngineInfoRequest,  # noqa: ARG002  # the contract's request is empty
        context: _Context,
    ) -> pb.GetEngineInfoResponse:
        """Return the engine's model, limits and features."""
        async with errors.boundary(context, "GetEngineInfo"):
            info = self._state.ready().engine.info()
            info.limits.max_receive_message_bytes = self._host.config.max_receive_message_bytes
            info.limits.max_send_message_bytes = self._host.config.max_send_message_bytes
            return pb.GetEngineInfoResponse(info=info)

    async def GetLoad(
        self,
        request: pb.GetLoadRequest,  # noqa: ARG002  # the contract's request is empty
        context: _Context,
    ) -> pb.GetLoadResponse:
        """Return the current load."""
        async with errors.boundary(context, "GetLoad"):
            return pb.GetLoadResponse(load=self._state.ready().load())

    def _incoming(self, request: pb.GenerateRequest | pb.GenerateStreamRequest, context: _Context) -> IncomingRequest:
        if not request.HasField("input"):
            raise errors.invalid_field("input", "must be set")
        return self._host.incoming(request.input, context)


def service(host: Host) -> Service:
    """Return the service, to register with the server's transport."""
    servicer = EngineServicer(host)
    return Service(_SERVICE_NAME, lambda server: add_EngineServiceServicer_to_server(servicer, server))
