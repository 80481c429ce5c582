"""What is remembered of the past, within a bound that one principal cannot fill at the cost of the others."""

from typing import Generic, TypeAlias, TypeVar

_T = TypeVar("_T")

Key: TypeAlias = tuple[str, str]
"""A principal and an id of its own."""


class Recent(Generic[_T]):
    """The newest values by key. Where it is full, a principal with more than its share loses its oldest."""

    def __init__(self, size: int) -> None:
        """Make an empty one.

        Args:
            size: most values.

        """
        self._size = size
        self._count = 0
        self._kept: dict[str, dict[str, _T]] = {}

    def __len__(self) -> int:
        return self._count

    def put(self, key: Key, value: _T) -> None:
        """Keep a value as the newest; it replaces the key's former one."""
        principal, name = key
        own = self._kept.setdefault(principal, {})
        if own.pop(name, None) is None:
            self._count += 1
        own[name] = value
        if self._count > self._size:
            self._forget_one(principal)

    def get(self, key: Key) -> _T | None:
        """Return a key's value; None where there is none."""
        principal, name = key
        own = self._kept.get(principal)
        return None if own is None else own.get(name)

    def pop(self, key: Key) -> _T | None:
        """Forget a key's value and return it; None where there is none."""
        principal, name = key
        own = self._kept.get(principal)
        value = None if own is None else own.pop(name, None)
        if own is not None and value is not None:
            self._count -= 1
            if not own:
                del self._kept[principal]
        return value

    def _forget_one(self, newcomer: str) -> None:
        # Most often it is the one that fills it, which saves a look at all of them.
        if len(self._kept[newcomer]) * len(self._kept) <= self._size:
            newcomer = max(self._kept, key=lambda principal: len(self._kept[principal]))
        self.pop((newcomer, next(iter(self._kept[newcomer]))))
