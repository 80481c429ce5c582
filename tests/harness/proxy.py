"""A TCP proxy that cuts connections, or stops forwarding without a word."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Self

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER, on, for no time: closing drops what waits and sends RST in place of FIN."""


class CuttingProxy:
    """Passes connections on to an address until it is told to cut them, without goodbye."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._upstream = (host, int(port))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        """Where the proxy listens; known inside its block."""
        self._forwards = asyncio.Event()
        self._forwards.set()
        self.answered = 0
        """Bytes that came from the server."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset all connections, on both sides."""
        for writer in self._writers:
            # One that has been closed has no socket any more.
            with contextlib.suppress(OSError):
                end = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    def freeze(self) -> None:
        """Forward nothing any more, with all connections open, as a network that drops packets does."""
        self._forwards.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
            self._writers.add(upstream_writer)
            await asyncio.gather(self._copy(reader, upstream_writer), self._copy(upstream_reader, writer, self._count))
            self._writers.discard(upstream_writer)
            upstream_writer.close()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            self._tasks.discard(task)

    def _count(self, size: int) -> None:
        self.answered += size

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None] | None = None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._forwards.wait()
                if count is not None:
                    count(len(data))
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
