"""The handles of a Multiplex stream: the numbers that identify its requests."""

from collections.abc import Iterable


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
        self._aborted: set[int] = set()

    def take(self) -> int:
        """Assign a free handle to a new request."""
        if self._free:
            handle = self._free.pop()
        else:
            self._count += 1
            handle = self._count
        self._live.add(handle)
        return handle

    def put_back(self, handle: int) -> None:
        """Free the handle of a request that is not sent."""
        self._live.remove(handle)
        self._free.append(handle)

    def abort(self, handles: Iterable[int]) -> list[int]:
        """Record that requests are aborted. Return each live one among them once, unless it was aborted before."""
        new = [handle for handle in dict.fromkeys(handles) if handle in self._live and handle not in self._aborted]
        self._aborted.update(new)
        return new

    def end(self, handle: int) -> None:
        """Record the end of a request."""
        if handle in self._live:
            self._live.remove(handle)
            self._aborted.discard(handle)
            self._ended.append(handle)

    def recycle(self) -> None:
        """Free the handles of ended requests."""
        self._free += self._ended
        self._ended.clear()

    def __len__(self) -> int:
        """Return the number of live requests."""
        return len(self._live)
