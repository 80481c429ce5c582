"""How a server ends: engine death, a hang, drain, and a server that is killed. A server of its own for each."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from harness import ServerProcess
from harness.processes import in_session
from harness.simulated import Simulated, generation_input, read_to_end, submit, until, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire_server.simulated_device import write_model_folder

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(180)]

ENGINE_DIED = 4
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def running(folder: Path, device: str, *arguments: str) -> AsyncIterator[tuple[Simulated, grpc.aio.Channel]]:
    log = folder / "steps.jsonl"
    model = write_model_folder(folder / "model")
    command = [str(model), "--max-model-len", "8192", "--max-num-seqs", "128"]
    device = f"{device},step_log={log}"
    with ServerProcess([*command, "--simulated-device", device, *arguments], wait=False) as server:
        await asyncio.to_thread(server.wait_ready)
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Simulated(server, log), channel


async def reason_of(call: grpc.aio.Call) -> str:
    """Wait for a call's failure and return its reason."""
    ended = within(call) if isinstance(call, grpc.aio.UnaryUnaryCall) else read_to_end(call)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await ended
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    return error_info(failed.value)


def error_info(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return str(info.reason)


async def watch(channel: grpc.aio.Channel) -> "grpc.aio.UnaryStreamCall[Any, Any]":
    call: grpc.aio.UnaryStreamCall[Any, Any] = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest()
    )
    assert (await next_health(call)).status == SERVING
    return call


async def next_health(call: Any) -> Any:
    return await within(call.read())


async def start_three(
    stub: EngineServiceStub, simulated: Simulated
) -> tuple[grpc.aio.Call, grpc.aio.Call, grpc.aio.Call]:
    """Start a request by each RPC and wait until the device has them."""
    unary = stub.Generate(pb.GenerateRequest(input=generation_input("unary")))
    stream = stub.GenerateStream(pb.GenerateStreamRequest(input=generation_input("stream")))
    multiplex = stub.Multiplex()
    await multiplex.write(submit(1, generation_input("multiplex")))
    await simulated.running("unary", "stream", "multiplex")
    return unary, stream, multiplex


async def check_all_failed(calls: tuple[grpc.aio.Call, grpc.aio.Call, grpc.aio.Call]) -> None:
    unary, stream, multiplex = calls
    assert await reason_of(unary) == "ENGINE_DEAD"
    assert await reason_of(stream) == "ENGINE_DEAD"
    assert isinstance(multiplex, grpc.aio.StreamStreamCall)
    while True:
        message = await within(multiplex.read())
        assert isinstance(message, pb.MultiplexResponse)
        assert not message.step.finished
        if message.step.failed:
            assert [(f.handle, f.status.reason) for f in message.step.failed] == [(1, "ENGINE_DEAD")]
            return


async def check_ended(simulated: Simulated, code: int) -> None:
    exit_code = await asyncio.to_thread(simulated.server.wait)
    assert exit_code == code, simulated.server.log
    assert not simulated.server.leftovers
    assert "Task was destroyed" not in simulated.server.log
    assert "never retrieved" not in simulated.server.log
    if code == 0:
        assert "Traceback" not in simulated.server.log, simulated.server.log
        assert "ERROR" not in simulated.server.log, simulated.server.log


async def test_a_killed_engine_fails_every_request_and_ends_the_server(tmp_path: Path) -> None:
    """FIELD_LOG 21, 24."""
    async with running(tmp_path, "step_ms=10") as (simulated, channel):
        calls = await start_three(EngineServiceStub(channel), simulated)
        health = await watch(channel)
        (engine,) = simulated.server.engine_pids()
        os.kill(engine, signal.SIGKILL)
        await check_all_failed(calls)
        assert (await next_health(health)).status == NOT_SERVING
        await check_ended(simulated, ENGINE_DIED)


async def test_an_exception_in_a_step_is_the_engines_death_also_while_the_server_drains(tmp_path: Path) -> None:
    async with running(tmp_path, "step_ms=10,fail_at_step=300") as (simulated, channel):
        calls = await start_three(EngineServiceStub(channel), simulated)
        simulated.server.send(signal.SIGTERM)
        await check_all_failed(calls)
        await check_ended(simulated, ENGINE_DIED)
        log = simulated.server.log
        assert 0 < log.index("draining: 3 requests") < log.index("the engine has died")


async def test_a_hanging_engine_counts_as_dead_and_a_server_may_stay(tmp_path: Path) -> None:
    arguments = ["--engine-timeout", "2", "--stay-after-engine-death"]
    async with running(tmp_path, "step_ms=10,hang_at_step=40", *arguments) as (simulated, channel):
        stub = EngineServiceStub(channel)
        await check_all_failed(await start_three(stub, simulated))
        health = health_pb2_grpc.HealthStub(channel)

        async def not_serving() -> None:
            while (await health.Check(health_pb2.HealthCheckRequest())).status != NOT_SERVING:  # noqa: ASYNC110  # Check has no event
                await asyncio.sleep(0.02)

        await within(not_serving())
        # It would keep its device, and go on once it wakes up.
        await until(lambda: not simulated.server.engine_pids())
        assert await reason_of(stub.Generate(pb.GenerateRequest(input=generation_input("late")))) == "ENGINE_DEAD"
        assert await reason_of(stub.GetEngineInfo(pb.GetEngineInfoRequest())) == "ENGINE_DEAD"
        simulated.server.send(signal.SIGTERM)
        await check_ended(simulated, ENGINE_DIED)


async def test_a_signal_lets_running_requests_finish_and_a_second_one_ends_them_with_their_tokens(
    tmp_path: Path,
) -> None:
    """FIELD_LOG 26."""
    async with running(tmp_path, "step_ms=20", "--drain-timeout", "600") as (simulated, channel):
        stub = EngineServiceStub(channel)
        health = await watch(channel)
        calls = [
            stub.Generate(pb.GenerateRequest(input=generation_input(f"drain-{i}", max_tokens=100))) for i in range(50)
        ]
        multiplex = stub.Multiplex()
        for handle in range(50):
            await multiplex.write(submit(handle, generation_input(f"drain-multiplex-{handle}", max_tokens=100)))
        endless = [stub.Generate(pb.GenerateRequest(input=generation_input(f"endless-{i}"))) for i in range(20)]
        stream = stub.GenerateStream(pb.GenerateStreamRequest(input=generation_input("endless-stream")))
        await simulated.running(
            *(f"drain-{i}" for i in range(50)),
            *(f"drain-multiplex-{i}" for i in range(50)),
            *(f"endless-{i}" for i in range(20)),
            "endless-stream",
        )
        simulated.server.send(signal.SIGTERM)
        assert (await next_health(health)).status == NOT_SERVING
        assert await reason_of(stub.Generate(pb.GenerateRequest(input=generation_input("late")))) == "DRAINING"
        await multiplex.write(submit(99, generation_input("late-too")))
        finished, rejected = 0, []
        while finished < 50:
            message = await within(multiplex.read())
            assert isinstance(message, pb.MultiplexResponse)
            finished += len(message.step.finished)
            rejected += [(r.handle, r.status.reason) for r in message.step.rejected]
            assert all(f.finish_reason == generation_pb2.FINISH_REASON_LENGTH for f in message.step.finished)
        assert rejected == [(99, "DRAINING")]
        for call in calls:
            response = await within(call)
            assert len(response.outputs[0].token_ids) == 100
        assert not any(call.done() for call in endless)
        simulated.server.send(signal.SIGINT)
        for call in endless:
            response = await within(call)
            assert response.outputs[0].finish_reason == generation_pb2.FINISH_REASON_ABORT
            assert response.outputs[0].token_ids
        last = None
        while (message := await within(stream.read())) is not grpc.aio.EOF:
            last = message
        assert isinstance(last, pb.GenerateStreamResponse)
        assert last.outputs[0].finish_reason == generation_pb2.FINISH_REASON_ABORT
        # An impatient person's, or a supervisor's, also meet the end of the interpreter.
        while any(process.pid == simulated.server.pid for process in in_session(simulated.server.pid)):
            simulated.server.send(signal.SIGINT)
            await asyncio.sleep(0.02)
        # An open Watch and an idle Multiplex do not hold the end up.
        await check_ended(simulated, 0)


async def test_sigint_ends_an_idle_server(tmp_path: Path) -> None:
    async with running(tmp_path, "step_ms=10", "--drain-timeout", "600") as (simulated, channel):
        stub = EngineServiceStub(channel)
        await within(stub.Generate(pb.GenerateRequest(input=generation_input("before", max_tokens=1))))
        simulated.server.send(signal.SIGINT)
        # It has nothing to wait for: the wait for its end is shorter than the drain's limit.
        await check_ended(simulated, 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await within(stub.GetEngineInfo(pb.GetEngineInfoRequest()))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_signal_during_the_load_ends_it(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    with ServerProcess([str(model), "--simulated-device", "step_ms=10"], wait=False) as server:
        await until(lambda: "loading" in server.stderr)
        await asyncio.sleep(1)
        server.send(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait) == 0, server.log
        assert not server.leftovers
