"""What a contender is."""

from typing import Protocol

from bench.cases import Case
from bench.measure import Seen


class Contender(Protocol):
    """A caller of one of the interfaces. It keeps its connection from case to case."""

    async def open(self, address: str) -> None:
        """Connect; start the engine where there is no server."""

    async def run(self, case: Case, prompts: list[list[int]], seen: Seen) -> None:
        """Start a request for each prompt at once and note what comes, until all have ended."""

    async def close(self) -> None:
        """Disconnect."""


class CancelsStreams(Contender, Protocol):
    """One that can also open streams and cancel them."""

    async def cancel(self, prompt: list[int], streams: int, concurrency: int) -> None:
        """Open so many streams and cancel each after its first token."""
