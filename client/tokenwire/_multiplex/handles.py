"""The handles of a Multiplex stream: the numbers that identify its requests."""


class Handles:
    """Assigns handles. A handle is reused after its request has ended and the caller has processed the end.

    Handles stay small: the highest is at most one above the maximum number of requests in flight. 0 is not used: the
    server reports errors that belong to no request with it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._live: set[int] = set()
        self._free: list[int] = []
        self._ended: list[int] = []

    def take(self) -> int:
        """Assign a free handle to a new request."""
        if self._free:
            handle = self._free.pop()
        else:
            self._count += 1
            handle = self._count
        self._live.add(handle)
        return handle

    def end(self, handle: int) -> None:
        """Record the end of a request."""
        if handle in self._live:
            self._live.remove(handle)
            self._ended.append(handle)

    def recycle(self) -> None:
        """Free the handles of ended requests."""
        self._free += self._ended
        self._ended.clear()

    def __contains__(self, handle: int) -> bool:
        """Whether a live request has this handle."""
        return handle in self._live

    def __len__(self) -> int:
        """Return the number of live requests."""
        return len(self._live)
