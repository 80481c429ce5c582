"""The RPC methods: thin, each says in order what happens to a call."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceServicer
from tokenwire_server import errors
from tokenwire_server.access import caller
from tokenwire_server.conversion import validation
from tokenwire_server.requests import trace_headers
from tokenwire_server.requests.reception import Reception
from tokenwire_server.services import responses
from tokenwire_server.services.call import Call, open_call
from tokenwire_server.services.multiplex.stream import MultiplexStream

_Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(EngineServiceServicer):
    """`tokenwire.v1.EngineService`."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._config = reception.config
        self._slow_readers = reception.slow_readers

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> pb.GenerateResponse:
        """Continue a prompt and answer once."""
        async with errors.boundary(context, "Generate"):
            with self._call(request, context, stream=False) as call:
                request_id = await call.start()
                return responses.unary(request.input, request_id, await call.next())

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Continue a prompt and answer as tokens come."""
        async with errors.boundary(context, "GenerateStream"):
            with self._call(request, context, stream=True) as call, self._slow_readers.watch(call):
                stream = responses.Stream(request.input, await call.start())
                finished = False
                while not finished:
                    chunk = await call.next()
                    finished = chunk.closing is not None
                    message = stream.next(chunk)
                    call.blocked_since = time.monotonic()
                    yield message
                    call.blocked_since = None

    async def Multiplex(
        self, request_iterator: AsyncIterator[pb.MultiplexRequest], context: _Context
    ) -> AsyncIterator[pb.MultiplexResponse]:
        """Carry many requests on one stream."""
        async with errors.boundary(context, "Multiplex"):
            serving = self._reception.accepting()
            stream = MultiplexStream(
                serving.engine,
                serving.registry,
                caller.of(context),
                check=self._check_accepting,
                max_requests=self._config.max_requests_per_stream,
            )
            actions = trace_headers.fill_submits(request_iterator, context.invocation_metadata())
            with self._slow_readers.watch(stream):
                async with contextlib.aclosing(stream.run(actions)) as messages:
                    async for message in messages:
                        yield message

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Abort requests by their ids."""
        async with errors.boundary(context, "Abort"):
            remember_seconds = validation.check_abort(request)
            registry = self._reception.ready().registry
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
        """Say what the engine is and can do."""
        async with errors.boundary(context, "GetEngineInfo"):
            info = self._reception.ready().engine.info()
            info.limits.max_receive_message_bytes = self._config.max_receive_message_bytes
            info.limits.max_send_message_bytes = self._config.max_send_message_bytes
            return pb.GetEngineInfoResponse(info=info)

    async def GetLoad(
        self,
        request: pb.GetLoadRequest,  # noqa: ARG002  # the contract's request is empty
        context: _Context,
    ) -> pb.GetLoadResponse:
        """Say how busy the engine is."""
        async with errors.boundary(context, "GetLoad"):
            return pb.GetLoadResponse(load=self._reception.ready().load())

    def _call(self, request: pb.GenerateRequest | pb.GenerateStreamRequest, context: _Context, *, stream: bool) -> Call:
        if not request.HasField("input"):
            raise errors.invalid_field("input", "must be set")
        return open_call(self._reception, request.input, context, stream=stream)

    def _check_accepting(self) -> None:
        self._reception.accepting()
