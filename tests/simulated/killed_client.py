"""A caller that a test kills: it starts one request by each RPC that it is told, says so, and waits."""

import asyncio
import sys

import grpc.aio

from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2, multiplex_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.sampling_params_pb2 import SamplingParams


def message(request_id: str) -> generation_pb2.GenerationInput:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    return generation_pb2.GenerationInput(
        request_id=request_id, prompt_token_ids=range(100, 228), sampling_params=params
    )


async def main(address: str, unary: str, stream: str, *multiplexed: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EngineServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(input=message(unary)))
        messages = stub.GenerateStream(pb.GenerateStreamRequest(input=message(stream)))
        await messages.read()
        multiplex = stub.Multiplex()
        for handle, request_id in enumerate(multiplexed):
            submit = multiplex_pb2.MultiplexSubmit(handle=handle, input=message(request_id))
            await multiplex.write(pb.MultiplexRequest(submit=submit))
        sys.stdout.write("started\n")
        sys.stdout.flush()
        await asyncio.wait_for(call, 60)


asyncio.run(main(*sys.argv[1:]))
