"""A Multiplex stream whose caller sends and does not read: what waits for it is bounded."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, read, within
from fake_engine.lives import Context
from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.multiplex_pb2 import MultiplexAbort, MultiplexSubmit
from tokenwire_server.errors import RequestError
from tokenwire_server.services.multiplex.stream import MultiplexStream

WITHOUT_INPUT = pb.MultiplexRequest(submit=MultiplexSubmit(handle=1))


@pytest.fixture
async def server(vllm_config: VllmConfig) -> Any:
    async with FakeEngineServer.run(vllm_config) as running:
        yield running


class UnreadContext(Context):
    """A call whose caller takes its first message and then reads no more."""

    def __init__(self) -> None:
        super().__init__()
        self.written: asyncio.Queue[pb.MultiplexResponse] = asyncio.Queue()
        self.reads = asyncio.Event()

    async def write(self, message: pb.MultiplexResponse) -> None:
        self.written.put_nowait(message)
        await self.reads.wait()


class Unread:
    """A stream that is blocked in the write of its first message."""

    def __init__(self, server: FakeEngineServer) -> None:
        self.actions: asyncio.Queue[pb.MultiplexRequest] = asyncio.Queue()
        self.context = UnreadContext()
        self.stream = MultiplexStream(server.host, cast("Any", self.context))
        self.running = asyncio.create_task(self.stream.run(self._sent()))

    async def _sent(self) -> AsyncIterator[pb.MultiplexRequest]:
        while True:
            yield await self.actions.get()

    async def refuse_one(self) -> None:
        self.actions.put_nowait(WITHOUT_INPUT)
        [rejection] = (await within(self.context.written.get())).step.rejected
        assert rejection.status.reason == Reason.INVALID_FIELD

    async def send(self, count: int) -> None:
        """Send actions and give the stream many turns to read them."""
        for _ in range(count):
            self.actions.put_nowait(WITHOUT_INPUT)
        for _ in range(10 * count):
            await asyncio.sleep(0)


async def test_refusals_that_are_not_read_count_as_waiting(server: FakeEngineServer) -> None:
    unread = Unread(server)
    await unread.refuse_one()
    assert unread.stream.waiting() == 0
    await unread.send(100)
    assert unread.actions.empty()
    assert unread.stream.waiting() >= 1000
    unread.running.cancel()


async def test_a_stream_that_was_given_up_reads_no_further(server: FakeEngineServer) -> None:
    """It ends once its message is written, which may be never; until then each action would leave an answer."""
    unread = Unread(server)
    await unread.refuse_one()
    unread.stream.give_up(RequestError(Reason.SLOW_READER, "too slow"))
    await unread.send(100)
    assert unread.actions.qsize() >= 99
    assert unread.stream.waiting() == 0
    unread.context.reads.set()
    with pytest.raises(RequestError, match="too slow"):
        await within(unread.running)


@pytest.mark.parametrize("count", [0, 16_385, 1_000_000])
async def test_an_abort_of_no_handle_or_too_many(server: FakeEngineServer, count: int) -> None:
    """Each unknown handle has an answer, so a message of 64 MB would stop the server for minutes."""
    call = server.stub.Multiplex()
    await call.write(pb.MultiplexRequest(abort=MultiplexAbort(handles=[7] * count)))
    [rejection] = (await read(call)).step.rejected
    assert (rejection.handle, rejection.status.reason) == (0, "INVALID_FIELD")
    await call.write(pb.MultiplexRequest(abort=MultiplexAbort(handles=[7, 8])))
    rejected = (await read(call)).step.rejected
    assert [(answer.handle, answer.status.reason) for answer in rejected] == [
        (7, "UNKNOWN_HANDLE"),
        (8, "UNKNOWN_HANDLE"),
    ]
    call.cancel()
