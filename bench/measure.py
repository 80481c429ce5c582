"""What a caller sees, and the figures made of it."""

import itertools
import time

import msgspec

from bench.cases import EOS, VOCABULARY, Case
from tokenwire._bench.recording import percentile
from tokenwire_server.simulated_device.formula import expected_tokens

_MS = 1e3


class Seen:
    """What came for each request of a case, as a coordinator would keep it."""

    __slots__ = ("logprobs", "started", "times", "tokens")

    def __init__(self, requests: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.logprobs: list[list[float]] = [[] for _ in range(requests)]
        self.times: list[list[float]] = [[] for _ in range(requests)]
        """When messages with tokens came."""
        self.started = time.perf_counter()

    def check(self, case: Case, prompts: list[list[int]]) -> None:
        """Raise ValueError unless every request got exactly the device's tokens, with log probabilities if asked."""
        for number, prompt in enumerate(prompts):
            expected = expected_tokens(
                prompt, case.output_tokens, vocab_size=VOCABULARY, eos_token_ids=(EOS,), ignore_eos=True
            )
            if self.tokens[number] != expected:
                raise ValueError(f"request {number} got {len(self.tokens[number])} tokens that are not the device's")
            if len(self.logprobs[number]) != (0 if case.logprobs is None else case.output_tokens):
                raise ValueError(f"request {number} got {len(self.logprobs[number])} log probabilities")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one contender. Latencies are None for unary answers."""

    wall_s: float
    tokens: int
    server_cpu_s: float
    caller_cpu_s: float
    first_token_p50_ms: float | None
    first_token_p99_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes while many streams are cancelled: before, after each quarter of them."""

    streams: int
    server: list[int]
    caller: list[int]


def sample(case: Case, seen: Seen, *, wall_s: float, server_cpu_s: float, caller_cpu_s: float) -> Sample:
    """Sum up what a caller has seen."""
    first: list[float] = []
    gaps: list[float] = []
    if not case.unary and all(len(times) > 1 for times in seen.times):
        first = sorted(times[0] - seen.started for times in seen.times)
        gaps = sorted(after - before for times in seen.times for before, after in itertools.pairwise(times))
    return Sample(
        wall_s=wall_s,
        tokens=sum(map(len, seen.tokens)),
        server_cpu_s=server_cpu_s,
        caller_cpu_s=caller_cpu_s,
        first_token_p50_ms=_ms(first, 0.50),
        first_token_p99_ms=_ms(first, 0.99),
        inter_token_p50_ms=_ms(gaps, 0.50),
        inter_token_p99_ms=_ms(gaps, 0.99),
    )


def _ms(ordered: list[float], share: float) -> float | None:
    return percentile(ordered, share) * _MS if ordered else None
