"""What is measured: cases, and the plan of a run."""

import random

import msgspec

VOCABULARY = 32_000
EOS = 2


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """So many requests at the same time, all started at once and run to their end."""

    step_ms: float
    concurrency: int
    prompt_tokens: int = 128
    output_tokens: int = 256
    logprobs: int | None = None
    unary: bool = False
    """Whether each request is answered once, at its end."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        parts = [f"{self.step_ms:g} ms steps", f"{self.concurrency} concurrent"]
        if self.prompt_tokens != _DEFAULT.prompt_tokens:
            parts.append(f"{self.prompt_tokens:,}-token prompts")
        if self.logprobs is not None:
            parts.append(f"logprobs={self.logprobs}")
        if self.unary:
            parts.append("unary")
        return ", ".join(parts)

    def prompts(self, seed: int) -> list[list[int]]:
        """Make the prompts; equal seeds give equal ones."""
        source = random.Random(seed)  # noqa: S311  # load, not secrets
        return [source.choices(range(VOCABULARY), k=self.prompt_tokens) for _ in range(self.concurrency)]


_DEFAULT = Case(step_ms=0, concurrency=0)
_SPECIAL = (
    Case(step_ms=5, concurrency=64, logprobs=5),
    Case(step_ms=5, concurrency=32, prompt_tokens=8_000, output_tokens=16, unary=True),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measures."""

    quick: bool
    rounds: int
    """Measurements of each case and contender; the figures are medians."""
    cases: list[Case]
    cancelled_streams: int
    """Streams that are opened and cancelled after their first token, to look at the memory."""


def full_plan() -> Plan:
    """Give the plan of `make bench`."""
    load = [
        Case(step_ms=step_ms, concurrency=concurrency)
        for step_ms, concurrencies in ((5, (16, 64, 128)), (20, (64, 128)))
        for concurrency in concurrencies
    ]
    return Plan(quick=False, rounds=3, cases=[*load, *_SPECIAL], cancelled_streams=50_000)


def quick_plan() -> Plan:
    """Give the plan of `make bench QUICK=1`: the cases that the goals are about, once."""
    return Plan(quick=True, rounds=1, cases=[Case(step_ms=5, concurrency=128), *_SPECIAL], cancelled_streams=2_000)
