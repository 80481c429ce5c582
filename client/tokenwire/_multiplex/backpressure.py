"""Backpressure from the readers of a Multiplex stream to its connection."""

import asyncio


class Backpressure:
    """Counts the unread tokens of all requests and pauses the connection while they are over the limit.

    The requests share the connection, so the token that one reader waits for may arrive behind another's. The limit
    therefore applies only while no reader waits. The tokens of a request are bounded by its max_tokens; a deadlock
    would last.
    """

    def __init__(self, max_unread_tokens: int) -> None:
        self._max_unread_tokens = max_unread_tokens
        self.unread_tokens = 0
        """Number of tokens that were received and not read."""
        self._waiting_readers = 0
        self._resumed: asyncio.Future[None] | None = None

    @property
    def is_paused(self) -> bool:
        """Whether no more messages should be read from the connection."""
        return self.unread_tokens > self._max_unread_tokens and not self._waiting_readers

    def tokens_read(self, num_tokens: int) -> None:
        """Subtract tokens that were read or dropped."""
        self.unread_tokens -= num_tokens
        if self._resumed is not None:
            self._check(self._resumed)

    def reader_waits(self) -> None:
        """Count a reader that waits for something to arrive."""
        self._waiting_readers += 1
        if self._resumed is not None:
            self._check(self._resumed)

    def reader_resumes(self) -> None:
        """Count a waiting reader out."""
        self._waiting_readers -= 1

    async def wait_until_resumed(self) -> None:
        """Wait while the connection is paused."""
        while self.is_paused:
            self._resumed = asyncio.get_running_loop().create_future()
            await self._resumed
        self._resumed = None

    def _check(self, resumed: asyncio.Future[None]) -> None:
        if not self.is_paused and not resumed.done():
            resumed.set_result(None)
