"""The cases of the benchmark and the plan of a run."""

import random

import msgspec

VOCABULARY = 32_000
EOS = 2
"""Vocabulary size and EOS id of the simulated model, as in Llama 2."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A number of concurrent requests that start at once and run to completion."""

    step_ms: float
    """Duration of an engine step, in milliseconds."""
    concurrency: int
    prompt_tokens: int = 128
    output_tokens: int = 256
    logprobs: int | None = None
    """The sampling parameter: number of top log probabilities per token; None for no log probabilities."""
    unary: bool = False
    """Whether each request gets one response, at its end, instead of a stream."""

    @property
    def name(self) -> str:
        """The name of the case in tables."""
        parts = [f"{self.step_ms:g} ms steps", f"{self.concurrency} concurrent"]
        if self.prompt_tokens != _DEFAULT.prompt_tokens:
            parts.append(f"{self.prompt_tokens:,}-token prompts")
        if self.logprobs is not None:
            parts.append(f"logprobs={self.logprobs}")
        if self.unary:
            parts.append("unary")
        return ", ".join(parts)

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the prompts of all requests, which depend on the seed only."""
        source = random.Random(seed)  # noqa: S311  # not used for secrets
        return [source.choices(range(VOCABULARY), k=self.prompt_tokens) for _ in range(self.concurrency)]


_DEFAULT = Case(step_ms=0, concurrency=0)
_SPECIAL = (
    Case(step_ms=5, concurrency=64, logprobs=5),
    Case(step_ms=5, concurrency=32, prompt_tokens=8_000, output_tokens=16, unary=True),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run."""

    quick: bool
    rounds: int
    """Number of measurements per case and contender; the report has their medians."""
    cases: list[Case]
    cancelled_streams: int
    """Number of streams that are cancelled after their first token to measure memory growth."""


def full_plan() -> Plan:
    """Return the plan of `make bench`."""
    load = [
        Case(step_ms=step_ms, concurrency=concurrency)
        for step_ms, concurrencies in ((5, (16, 64, 128)), (20, (64, 128)))
        for concurrency in concurrencies
    ]
    return Plan(quick=False, rounds=3, cases=[*load, *_SPECIAL], cancelled_streams=50_000)


def quick_plan() -> Plan:
    """Return the plan of `make bench QUICK=1`: one round of the cases that the goals refer to."""
    return Plan(quick=True, rounds=1, cases=[Case(step_ms=5, concurrency=128), *_SPECIAL], cancelled_streams=2_000)
