"""A caller that goes away, in whatever manner, takes its requests out of the engine. FIELD_LOG 6, 36, 37, 43."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

import tokenwire
from harness.simulated import MAX_NUM_SEQS, Simulated, generation_input, read_to_end, submit, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

pytestmark = pytest.mark.simulated

KILLED_CLIENT = Path(__file__).with_name("killed_client.py")


async def start_unary(stub: EngineServiceStub, request_id: str, deadline: float | None) -> grpc.aio.Call:
    call: grpc.aio.Call = stub.Generate(pb.GenerateRequest(input=generation_input(request_id)), timeout=deadline)
    return call


async def start_stream(stub: EngineServiceStub, request_id: str, deadline: float | None) -> grpc.aio.Call:
    call: grpc.aio.Call = stub.GenerateStream(
        pb.GenerateStreamRequest(input=generation_input(request_id)), timeout=deadline
    )
    return call


async def start_multiplex(stub: EngineServiceStub, request_id: str, deadline: float | None) -> grpc.aio.Call:
    call = stub.Multiplex(timeout=deadline)
    await call.write(submit(1, generation_input(request_id)))
    admitted = await within(call.read())
    assert isinstance(admitted, pb.MultiplexResponse)
    assert admitted.step.accepted[0].request_id == request_id
    return call


RPCS = pytest.mark.parametrize(
    "start", [start_unary, start_stream, start_multiplex], ids=["Generate", "GenerateStream", "Multiplex"]
)
Start = Callable[[EngineServiceStub, str, float | None], Awaitable[grpc.aio.Call]]


@RPCS
async def test_cancel_ends_a_running_request(simulated: Simulated, stub: EngineServiceStub, start: Start) -> None:
    request_id = f"cancel-{start.__name__}"
    call = await start(stub, request_id, None)
    await simulated.running(request_id)
    call.cancel()
    await simulated.gone(request_id)


@RPCS
async def test_an_expired_deadline_ends_a_running_request(
    simulated: Simulated, stub: EngineServiceStub, start: Start
) -> None:
    request_id = f"deadline-{start.__name__}"
    call = await start(stub, request_id, 0.5)
    await simulated.running(request_id)
    assert await within(call.code()) == grpc.StatusCode.DEADLINE_EXCEEDED
    await simulated.gone(request_id)


@RPCS
async def test_a_closed_connection_ends_a_running_request(simulated: Simulated, start: Start) -> None:
    request_id = f"close-{start.__name__}"
    channel = simulated.connect()
    await start(EngineServiceStub(channel), request_id, None)
    await simulated.running(request_id)
    await channel.close()
    await simulated.gone(request_id)


async def until_taken(stub: EngineServiceStub, request_id: str) -> None:
    """Wait until the server has a request of the id, queued or running."""
    # A call that has been answered came after the request; a probe that overtook it would take its id.
    await within(stub.GetEngineInfo(pb.GetEngineInfoRequest()))
    async with asyncio.timeout(30):
        while True:
            probe = stub.Generate(pb.GenerateRequest(input=generation_input(request_id, max_tokens=1)), timeout=0.1)
            if await probe.code() == grpc.StatusCode.ALREADY_EXISTS:
                return


@RPCS
async def test_cancel_ends_a_queued_request(simulated: Simulated, stub: EngineServiceStub, start: Start) -> None:
    request_id = f"queued-{start.__name__}"
    full = [f"full-{start.__name__}-{i}" for i in range(MAX_NUM_SEQS)]
    filling = stub.Multiplex()
    for handle, name in enumerate(full):
        await filling.write(submit(handle, generation_input(name)))
    await simulated.running(*full)
    call = await start(stub, request_id, None)
    # The engine has it, the device does not: nothing to look at but what the caller is told of a second one.
    await until_taken(stub, request_id)
    call.cancel()
    await asyncio.sleep(0)
    filling.cancel()
    await simulated.gone(*full)
    await within(stub.Generate(pb.GenerateRequest(input=generation_input("next", max_tokens=3))))
    assert not any(step.computes(request_id) for step in simulated.steps())


async def test_a_killed_client_leaves_no_request_behind(simulated: Simulated) -> None:
    names = ["killed-unary", "killed-stream", *(f"killed-multiplex-{i}" for i in range(3))]
    process = await asyncio.create_subprocess_exec(
        sys.executable, KILLED_CLIENT, simulated.address, *names, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await within(process.stdout.readline()) == b"started\n"
        await simulated.running(*names)
        process.send_signal(signal.SIGKILL)
        await simulated.gone(*names)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


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
