"""What the server is asked to do: how many requests, how long, when."""

import random
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Mode(StrEnum):
    """The RPC that carries the requests."""

    UNARY = "unary"
    """Generate: one call and one answer for each request."""
    STREAM = "stream"
    """GenerateStream: one call for each request, tokens as they come."""
    MULTIPLEX = "multiplex"
    """Multiplex: one stream for all requests."""


class Lengths(msgspec.Struct, frozen=True):
    """A number of tokens, or a range that each request takes its own from, evenly distributed."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read "128" or "64-256". Raises ValueError."""
        least, dash, most = text.partition("-")
        if not (least.isdecimal() and (most.isdecimal() if dash else True)):
            raise ValueError(f"expected a number like 128 or a range like 64-256, not {text!r}")
        lengths = cls(int(least), int(most) if dash else int(least))
        if not 1 <= lengths.least <= lengths.most:
            raise ValueError(f"expected 1 or more, the smaller number first, not {text!r}")
        return lengths

    def draw(self, source: random.Random) -> int:
        """Take one."""
        return source.randint(self.least, self.most)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A run's mix of requests. Equal workloads, seed included, send equal requests."""

    mode: Mode
    prompt_tokens: Lengths
    output_tokens: Lengths
    requests: int | None
    """Number of requests; None: as many as start in `duration_s`."""
    duration_s: float | None
    """Seconds after which no request is started; None: no limit."""
    concurrency: int | None
    """Most requests at the same time; None: no limit, which needs a rate."""
    rate: float | None
    """Requests a second, at random times (a Poisson process); None: a new one as soon as one has ended."""
    logprobs: int | None
    ignore_eos: bool
    warmup: int
    """Requests before the measurement."""
    seed: int


class Request(NamedTuple):
    """One request."""

    prompt_token_ids: list[int]
    max_tokens: int


def requests_of(workload: Workload, vocab_size: int) -> Iterator[Request]:
    """Make the workload's requests, without an end."""
    source = random.Random(workload.seed)  # noqa: S311  # benchmark traffic, not secrets
    while True:
        yield Request(
            prompt(source, workload.prompt_tokens.draw(source), vocab_size), workload.output_tokens.draw(source)
        )


def prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    """Make a prompt of random ids. As good as unique: no two share a prefix block."""
    return source.choices(range(vocab_size), k=length)
