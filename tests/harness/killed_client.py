"""A caller that a test kills: starts one request, says so, and waits. Arguments: address, method; stdin: its message."""

import asyncio
import sys

import grpc.aio

from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub


async def main(address: str, method: str) -> None:
    message = sys.stdin.buffer.read()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EngineServiceStub(channel)
        # A call that nobody holds would be collected.
        call: grpc.aio.Call
        if method == "Generate":
            call = stub.Generate(pb.GenerateRequest.FromString(message))
        elif method == "GenerateStream":
            call = stub.GenerateStream(pb.GenerateStreamRequest.FromString(message))
        else:
            call = multiplex = stub.Multiplex()
            await multiplex.write(pb.MultiplexRequest.FromString(message))
        # Sent after the request, so that its answer comes after the request's arrival.
        await stub.GetEngineInfo(pb.GetEngineInfoRequest())
        sys.stdout.write("started\n")
        sys.stdout.flush()
        await asyncio.wait_for(call.code(), 60)


asyncio.run(main(*sys.argv[1:]))
