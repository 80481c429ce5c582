"""The server's side of a Multiplex call, moved by a test."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2, multiplex_pb2

STOP = generation_pb2.FINISH_REASON_STOP
ABORT = generation_pb2.FINISH_REASON_ABORT


class MultiplexPeer:
    """Serves calls of Multiplex, one after the other: the test takes the caller's actions and says what is answered."""

    def __init__(self) -> None:
        self._actions: asyncio.Queue[pb.MultiplexRequest | None] = asyncio.Queue()
        self._answers: asyncio.Queue[pb.MultiplexResponse | tuple[grpc.StatusCode, str] | None] = asyncio.Queue()
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.sent = 0
        """Number of messages that the connection has taken."""

    async def multiplex(
        self, requests: AsyncIterator[pb.MultiplexRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.MultiplexResponse]:
        """Serve a call."""
        self.started.set()
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, tuple):
                    await context.abort(*answer)
                else:
                    yield answer
                    self.sent += 1
        finally:
            reader.cancel()
            self.ended.set()

    async def submit(self) -> multiplex_pb2.MultiplexSubmit:
        """Take the next action, a submit."""
        action = await self._actions.get()
        assert action is not None
        assert action.WhichOneof("action") == "submit"
        return action.submit

    async def abort(self) -> list[int]:
        """Take the next action, an abort."""
        action = await self._actions.get()
        assert action is not None
        assert action.WhichOneof("action") == "abort"
        return list(action.abort.handles)

    async def half_close(self) -> None:
        """Take the end of the caller's side."""
        assert await self._actions.get() is None

    def answer(self, message: pb.MultiplexResponse) -> None:
        """Send a message."""
        self._answers.put_nowait(message)

    def step(self, **fields: Any) -> None:
        """Send a step."""
        self.answer(pb.MultiplexResponse(step=multiplex_pb2.MultiplexStep(**fields)))

    def tokens(self, handle: int, *token_ids: int) -> None:
        """Send a step with tokens of one request."""
        self.step(handles=[handle], token_counts=[len(token_ids)], token_ids=token_ids)

    def finish(self, *handles: int) -> None:
        """Send a step with the ends of requests."""
        self.step(finished=[finish(handle) for handle in handles])

    def end(self) -> None:
        """End the call with OK."""
        self._answers.put_nowait(None)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with another status."""
        self._answers.put_nowait((code, details))

    async def _read(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        async for request in requests:
            self._actions.put_nowait(request)
        self._actions.put_nowait(None)


def finish(handle: int, reason: int = STOP, **fields: Any) -> Any:
    """Give the last finish of a request."""
    usage = generation_pb2.Usage(prompt_tokens=1, completion_tokens=2)
    values: dict[str, Any] = {"handle": handle, "finish_reason": reason, "last": True, "usage": usage, **fields}
    return multiplex_pb2.MultiplexFinish(**values)
