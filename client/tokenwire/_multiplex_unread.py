"""Flow control towards the readers of a Multiplex stream."""

import asyncio


class Unread:
    """Counts the tokens that no reader has taken, and says when to stop taking more from the connection.

    All requests share the connection, so that one reader's next token may lie behind another's. Hence the limit holds
    while nobody waits. While a reader waits, messages are taken whatever the count: a request's tokens are bounded by
    its max_tokens, a deadlock is not.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_tokens = 0
        """Tokens that no reader has taken."""
        self._num_waiting = 0
        self._room: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether to stop taking messages."""
        return self.num_tokens > self._limit and not self._num_waiting

    def take(self, num_tokens: int) -> None:
        """Note that a reader has taken tokens, or that nobody will."""
        self.num_tokens -= num_tokens
        if self._room is not None:
            self._check(self._room)

    def reader_waits(self) -> None:
        """Note that a reader waits."""
        self._num_waiting += 1
        if self._room is not None:
            self._check(self._room)

    def reader_goes_on(self) -> None:
        """Note that a reader no longer waits."""
        self._num_waiting -= 1

    async def wait_for_room(self) -> None:
        """Wait while messages should not be taken."""
        while self.is_over:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self._room = None

    def _check(self, room: asyncio.Future[None]) -> None:
        if not self.is_over and not room.done():
            room.set_result(None)
