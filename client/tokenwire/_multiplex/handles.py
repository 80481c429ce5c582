"""The numbers that a Multiplex stream's requests go by."""


class Handles:
    """Gives out handles. One is used again only after its request has ended and the caller has been told.

    The numbers stay small: at most one more than there ever were requests at once. 0 is left out, since a server
    answers with it what concerns no request.
    """

    def __init__(self) -> None:
        self._count = 0
        self._live: set[int] = set()
        self._free: list[int] = []
        self._ended: list[int] = []

    def take(self) -> int:
        """Give a free handle to a new request."""
        if self._free:
            handle = self._free.pop()
        else:
            self._count += 1
            handle = self._count
        self._live.add(handle)
        return handle

    def end(self, handle: int) -> None:
        """Note the end of a request."""
        if handle in self._live:
            self._live.remove(handle)
            self._ended.append(handle)

    def recycle(self) -> None:
        """Make the handles of ended requests free."""
        self._free += self._ended
        self._ended.clear()

    def __contains__(self, handle: int) -> bool:
        """Whether a live request has that handle."""
        return handle in self._live

    def __len__(self) -> int:
        """Give the number of live requests."""
        return len(self._live)
