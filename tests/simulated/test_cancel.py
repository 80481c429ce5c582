"""The Python client's iterator that is left, and a reader that stands still, on both output paths.

`test_cancel_matrix.py` has all ways of going away. FIELD_LOG 6, 36, 37, 43.
"""

import asyncio
import contextlib

import grpc.aio
import pytest

import tokenwire
from harness.simulated import Simulated, both_paths, generation_input, read_to_end, submit, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

pytestmark = [pytest.mark.simulated, both_paths]


async def test_leaving_the_clients_iterator_ends_the_request(simulated: Simulated) -> None:
    async with tokenwire.AsyncClient(simulated.address) as client:
        params = tokenwire.SamplingParams(max_tokens=4000, ignore_eos=True)
        async for _ in client.stream([1, 2, 3], params, request_id="left-by-break"):
            break
        await simulated.gone("left-by-break")
        with contextlib.suppress(ZeroDivisionError):
            async with client.stream([1, 2, 3], params, request_id="left-by-error") as deltas:
                async for _ in deltas:
                    raise ZeroDivisionError
        await simulated.gone("left-by-error")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate([1, 2, 3], params, request_id="left-by-timeout"), 0.3)
        await simulated.gone("left-by-timeout")


async def test_a_stalled_reader_is_ended_and_others_do_not_notice(
    simulated: Simulated, stub: EngineServiceStub
) -> None:
    """FIELD_LOG 55."""
    # Without bandwidth probing the window stays at 64 KiB, and a message of log probabilities fills it soon.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(simulated.address, options) as slow:
        stalled = EngineServiceStub(slow)
        stream = stalled.GenerateStream(
            pb.GenerateStreamRequest(input=generation_input("stalled-stream", logprobs=20, max_tokens=6000))
        )
        await within(stream.read())
        multiplex = stalled.Multiplex()
        await multiplex.write(submit(1, generation_input("stalled-multiplex", logprobs=20, max_tokens=6000)))
        await simulated.running("stalled-stream", "stalled-multiplex")
        other = await within(stub.Generate(pb.GenerateRequest(input=generation_input("not-stalled", max_tokens=50))))
        assert len(other.outputs[0].token_ids) == 50
        await simulated.gone("stalled-stream", "stalled-multiplex")
        for call in (stream, multiplex):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await read_to_end(call)
            assert ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
