"""Mixed load with cancels, aborts, cut connections and slow readers: every request ends once, and nothing stays.

Some seconds in the suite; `make soak` sets TOKENWIRE_SOAK_SECONDS to ten minutes.
"""

import asyncio
import collections
import os
import random

import grpc.aio
import psutil
import pytest

from harness.proxy import CuttingProxy
from harness.simulated import Simulated, generation_input, submit, until
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2, multiplex_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire_server.simulated_device.formula import expected_tokens

SECONDS = float(os.environ.get("TOKENWIRE_SOAK_SECONDS", "16"))
CALLERS = 24
EXPECTED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
"""What a cut connection, a cancel and a deadline look like."""
LOST_WRITE = "Internal error from Core"
"""grpc.aio's own text, with INTERNAL, for a write on a call whose connection was cut a moment ago."""

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(SECONDS + 150)]

PROMPT = list(range(100, 164))


class Chaos:
    """The callers, and what has become of their requests."""

    def __init__(self, simulated: Simulated, proxy: CuttingProxy) -> None:
        self.simulated = simulated
        self.proxy = proxy
        self.random = random.Random(7)  # noqa: S311  # a test's dice
        self.count = 0
        self.ends: collections.Counter[str] = collections.Counter()

    def request_id(self) -> str:
        self.count += 1
        return f"chaos-{self.count}"

    def max_tokens(self) -> int:
        return self.random.choice([1, 3, 20, 100, 400])

    async def run(self, seconds: float) -> None:
        """Let the callers do what they do for some seconds, then wait for them."""
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cut(end))
            for number in range(CALLERS):
                group.create_task(self._caller(number, end))

    async def _cut(self, end: float) -> None:
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(self.random.uniform(0.5, 3))
            self.proxy.cut()

    async def _caller(self, number: int, end: float) -> None:
        # Every third caller is behind the proxy.
        address = self.proxy.address if number % 3 == 0 else self.simulated.address
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            stub = EngineServiceStub(channel)
            while asyncio.get_running_loop().time() < end:
                act = self.random.choice([self._unary, self._stream, self._multiplex])
                try:
                    async with asyncio.timeout(60):
                        await act(stub)
                except grpc.aio.AioRpcError as error:
                    lost_write = error.code() is grpc.StatusCode.INTERNAL and error.details() == LOST_WRITE
                    if error.code() not in EXPECTED and not lost_write:
                        raise
                    self.ends["UNAVAILABLE" if lost_write else error.code().name] += 1
                except asyncio.InvalidStateError:
                    # grpc.aio's word for a write on a stream whose connection was cut.
                    self.ends["UNAVAILABLE"] += 1

    async def _unary(self, stub: EngineServiceStub) -> None:
        count, request_id = self.max_tokens(), self.request_id()
        deadline = self.random.choice([None, None, 0.05, 0.3])
        request = pb.GenerateRequest(input=generation_input(request_id, PROMPT, max_tokens=count))
        call = stub.Generate(request, timeout=deadline)
        abort = self.random.random() < 0.3
        if abort:
            await asyncio.sleep(self.random.uniform(0, 0.1))
            await stub.Abort(pb.AbortRequest(request_ids=[request_id]))
        response = await call
        self._check(list(response.outputs[0].token_ids), count, response.outputs[0].finish_reason)

    async def _stream(self, stub: EngineServiceStub) -> None:
        count, reason = self.max_tokens(), 0
        tokens: list[int] = []
        call = stub.GenerateStream(
            pb.GenerateStreamRequest(input=generation_input(self.request_id(), PROMPT, max_tokens=count))
        )
        leave_after = self.random.choice([None, None, 1, 30])
        async for response in call:
            assert not reason, "a message after the finish"
            for output in response.outputs:
                tokens += output.token_ids
                reason = output.finish_reason
            if leave_after is not None and len(tokens) >= leave_after and not reason:
                call.cancel()
                self.ends["left"] += 1
                return
            if self.random.random() < 0.02:
                await asyncio.sleep(0.2)
        self._check(tokens, count, reason)

    async def _multiplex(self, stub: EngineServiceStub) -> None:
        call = stub.Multiplex()
        counts = {handle: self.max_tokens() for handle in range(self.random.randint(1, 20))}
        for handle, count in counts.items():
            await call.write(submit(handle, generation_input(self.request_id(), PROMPT, max_tokens=count)))
        if self.random.random() < 0.3:
            handles = [handle for handle in counts if self.random.random() < 0.3] or [0]
            await call.write(pb.MultiplexRequest(abort=multiplex_pb2.MultiplexAbort(handles=handles)))
        leave = self.random.random() < 0.2
        await call.done_writing()
        tokens: dict[int, list[int]] = {handle: [] for handle in counts}
        finished: dict[int, int] = {}
        async for message in call:
            step = message.step
            sizes = step.token_counts or [1] * len(step.handles)
            position = 0
            for handle, size in zip(step.handles, sizes, strict=True):
                assert handle not in finished
                tokens[handle] += step.token_ids[position : position + size]
                position += size
            for finish in step.finished:
                assert finish.handle not in finished
                finished[finish.handle] = finish.finish_reason
            if leave and finished:
                call.cancel()
                self.ends["left"] += 1
                return
        assert finished.keys() == counts.keys()
        for handle, reason in finished.items():
            self._check(tokens[handle], counts[handle], reason)

    def _check(self, tokens: list[int], count: int, reason: int) -> None:
        assert reason in {generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_ABORT}
        if reason == generation_pb2.FINISH_REASON_LENGTH:
            assert len(tokens) == count
        assert tokens == expected_tokens(PROMPT, len(tokens), vocab_size=32_000)
        self.ends["LENGTH" if reason == generation_pb2.FINISH_REASON_LENGTH else "ABORT"] += 1


async def test_chaos(simulated: Simulated) -> None:
    # What other tests have had logged is before this.
    logged = len(simulated.server.stderr)
    async with CuttingProxy(simulated.address) as proxy:
        chaos = Chaos(simulated, proxy)
        process = psutil.Process(simulated.server.pid)
        await chaos.run(SECONDS / 2)
        memory = process.memory_info().rss
        await chaos.run(SECONDS / 2)
        grown = process.memory_info().rss - memory
    assert chaos.ends["LENGTH"] > 20
    assert chaos.ends["ABORT"]
    assert chaos.ends["left"]
    await until(lambda: not simulated.held())
    # The outcomes that are kept for late aborts grow with the requests.
    assert grown < 30 * 2**20 + 1000 * chaos.count, f"{grown / 2**20:.0f} MiB more after {chaos.count} requests"
    log = simulated.server.stderr[logged:]
    for trouble in ("never retrieved", "was destroyed", "Traceback", "failed unexpectedly", "could not"):
        assert trouble not in log
