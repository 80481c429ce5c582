"""A bounded cache that principals share fairly: no principal can evict values within another's share."""

from collections import OrderedDict
from typing import Generic, TypeAlias, TypeVar

_T = TypeVar("_T")

Key: TypeAlias = tuple[str, str]
"""A principal and one of its ids."""


class FairCache(Generic[_T]):
    """The newest values by key. When the cache is full, a principal above its share loses its oldest value."""

    def __init__(self, size: int) -> None:
        """Make an empty cache.

        Args:
            size: maximum number of values.

        """
        self._size = size
        self._count = 0
        # To find its first key, a dict walks all the keys deleted before it, an OrderedDict none.
        self._kept: dict[str, OrderedDict[str, _T]] = {}

    def __len__(self) -> int:
        return self._count

    def put(self, key: Key, value: _T) -> None:
        """Store a value as the newest, replacing the key's previous value."""
        principal, name = key
        own = self._kept.setdefault(principal, OrderedDict())
        if own.pop(name, None) is None:
            self._count += 1
        own[name] = value
        if self._count > self._size:
            self._evict_one(principal)

    def get(self, key: Key) -> _T | None:
        """Return a key's value; None if there is none."""
        principal, name = key
        own = self._kept.get(principal)
        return None if own is None else own.get(name)

    def pop(self, key: Key) -> _T | None:
        """Remove a key's value and return it; None if there is none."""
        principal, name = key
        own = self._kept.get(principal)
        value = None if own is None else own.pop(name, None)
        if own is not None and value is not None:
            self._count -= 1
            if not own:
                del self._kept[principal]
        return value

    def _evict_one(self, newcomer: str) -> None:
        # Usually the newcomer itself is above its share, which saves comparing all principals.
        if len(self._kept[newcomer]) * len(self._kept) <= self._size:
            newcomer = max(self._kept, key=lambda principal: len(self._kept[principal]))
        self.pop((newcomer, next(iter(self._kept[newcomer]))))
