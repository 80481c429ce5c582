"""The workload: how many requests, of which lengths, when."""

import random
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Mode(StrEnum):
    """The RPC that carries the requests."""

    UNARY = "unary"
    """Generate: one call and one response per request."""
    STREAM = "stream"
    """GenerateStream: one call per request, tokens as they arrive."""
    MULTIPLEX = "multiplex"
    """Multiplex: one stream for all requests."""


class Lengths(msgspec.Struct, frozen=True):
    """A number of tokens, or a range from which each request draws its own, uniformly."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse "128" or "64-256". Raises ValueError."""
        least, dash, most = text.partition("-")
        if not (least.isdecimal() and (most.isdecimal() if dash else True)):
            raise ValueError(f"expected a number like 128 or a range like 64-256, not {text!r}")
        lengths = cls(int(least), int(most) if dash else int(least))
        if not 1 <= lengths.least <= lengths.most:
            raise ValueError(f"expected 1 or more, the smaller number first, not {text!r}")
        return lengths

    def draw(self, source: random.Random) -> int:
        """Draw a length."""
        return source.randint(self.least, self.most)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a run. Equal workloads with equal seeds send equal requests."""

    mode: Mode
    prompt_tokens: Lengths
    output_tokens: Lengths
    requests: int | None
    """Number of requests. None: as many as start within `duration_s`."""
    duration_s: float | None
    """Seconds after which no more requests start. None: no limit."""
    concurrency: int | None
    """Maximum number of requests in flight. None: no limit, which needs a rate."""
    rate: float | None
    """Requests per second, at random times (a Poisson process). None: a request starts when another one ends."""
    logprobs: int | None
    ignore_eos: bool
    warmup: int
    """Number of requests before the measurement."""
    seed: int


class Request(NamedTuple):
    """One request."""

    prompt_token_ids: list[int]
    max_tokens: int


def requests_of(workload: Workload, vocab_size: int) -> Iterator[Request]:
    """Yield the workload's requests, endlessly."""
    source = random.Random(workload.seed)  # noqa: S311  # benchmark traffic, not secrets
    while True:
        yield Request(
            prompt(source, workload.prompt_tokens.draw(source), vocab_size), workload.output_tokens.draw(source)
        )


def prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    """Make a prompt of random token ids. Two prompts share no prefix block, with near certainty.

    Args:
        source: the random number generator.
        length: number of tokens.
        vocab_size: ids are drawn from 0 to vocab_size - 1.

    Returns:
        The token ids.

    """
    return source.choices(range(vocab_size), k=length)
