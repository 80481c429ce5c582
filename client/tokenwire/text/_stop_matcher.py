"""Finds the first stop string in a text that arrives in pieces, and holds back text that may become one."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete, without any part of the one that matches.

    It holds back only the longest suffix of the text that is a prefix of a stop string. As in vLLM, the stop string
    that is complete first matches; of several that end at the same character, the first in the list. With `include`,
    the stop string is passed through too, and nothing is held back. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._scanners = [_Scanner(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that matched; None if none has."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add a piece of text.

        Args:
            text: the piece.
            may_stop: False: a stop string that ends in this piece does not match; one that starts in it may match later.

        Returns:
            The text to show; empty after a match.

        """
        if not self._scanners:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            for scanner in self._scanners:
                if scanner.feed(text[position]) and may_stop and self.matched is None:
                    self.matched = scanner.stop
            if self.matched is not None:
                end = position + 1
                self._held = ""
                return text[: end if self._include else end - len(self.matched)]
        num_held = 0 if self._include else max(scanner.num_matched for scanner in self._scanners)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Scanner:
    """Searches for one stop string with the algorithm of Knuth, Morris and Pratt."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.num_matched = 0
        """Length of the longest suffix of the text that is a proper prefix of the stop string."""
        # For each prefix of the stop string, the length of its longest proper suffix that is also a prefix.
        self._borders = [0]
        for character in stop[1:]:
            self._borders.append(self._next(self._borders[-1], character))

    def feed(self, character: str) -> bool:
        """Add the next character of the text. Return whether the stop string ends with it."""
        self.num_matched = self._next(self.num_matched, character)
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._borders[-1]
        return True

    def _next(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._borders[num_matched - 1]
        return num_matched + 1 if self.stop[num_matched] == character else 0
