"""The protocols that contenders implement."""

from typing import Protocol

from bench.cases import Case
from bench.measure import Received


class Contender(Protocol):
    """A client of one of the interfaces, with one connection for all cases."""

    async def open(self, address: str) -> None:
        """Connect to the server, or start the engine if there is no server."""

    async def run(self, case: Case, prompts: list[list[int]], received: Received) -> None:
        """Start one request per prompt at once and record the outputs until all have finished.

        Args:
            case: number of output tokens and other parameters.
            prompts: token ids of the prompts.
            received: records the outputs.

        """

    async def close(self) -> None:
        """Disconnect."""


class CancellingContender(Contender, Protocol):
    """A contender that can also cancel streams."""

    async def cancel(self, prompt: list[int], streams: int, concurrency: int) -> None:
        """Open streams and cancel each after its first token.

        Args:
            prompt: token ids of the prompt.
            streams: total number of streams.
            concurrency: number of concurrent streams.

        """
