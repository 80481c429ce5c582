"""Measurements at a caller: the outputs it receives, and the figures computed from them."""

import itertools
import time

import msgspec

from bench.cases import EOS, VOCABULARY, Case
from tokenwire._bench.recording import percentile
from tokenwire_server.simulated_device.formula import expected_tokens

_MS = 1e3


class Received:
    """The outputs received for each request of a case, stored the way a coordinator would."""

    __slots__ = ("logprobs", "started", "times", "tokens")

    def __init__(self, requests: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.logprobs: list[list[float]] = [[] for _ in range(requests)]
        self.times: list[list[float]] = [[] for _ in range(requests)]
        """Arrival times of messages with tokens, by time.perf_counter()."""
        self.started = time.perf_counter()

    def check(self, case: Case, prompts: list[list[int]]) -> None:
        """Check that every request received exactly the tokens of the simulated device, and all log probabilities.

        Raises:
            ValueError: a token or a log probability is missing, or a token is wrong.

        """
        for number, prompt in enumerate(prompts):
            expected = expected_tokens(
                prompt, case.output_tokens, vocab_size=VOCABULARY, eos_token_ids=(EOS,), ignore_eos=True
            )
            if self.tokens[number] != expected:
                raise ValueError(
                    f"request {number} received {len(self.tokens[number])} tokens that differ from the device's"
                )
            if len(self.logprobs[number]) != (0 if case.logprobs is None else case.output_tokens):
                raise ValueError(f"request {number} received {len(self.logprobs[number])} log probabilities")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one contender. Latencies are None for unary cases."""

    wall_s: float
    tokens: int
    server_cpu_s: float
    caller_cpu_s: float
    first_token_p50_ms: float | None
    first_token_p99_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None


class MemoryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory in bytes while streams are cancelled: before, and after each quarter of them."""

    streams: int
    server: list[int]
    caller: list[int]


def sample(case: Case, received: Received, *, wall_s: float, server_cpu_s: float, caller_cpu_s: float) -> Sample:
    """Return the figures of a measurement.

    Args:
        case: the case.
        received: the outputs that the caller has received.
        wall_s: seconds from the start of the case to its end.
        server_cpu_s: CPU time of the server process, in seconds.
        caller_cpu_s: CPU time of the caller process, in seconds.

    """
    first: list[float] = []
    gaps: list[float] = []
    if not case.unary and all(len(times) > 1 for times in received.times):
        first = sorted(times[0] - received.started for times in received.times)
        gaps = sorted(after - before for times in received.times for before, after in itertools.pairwise(times))
    return Sample(
        wall_s=wall_s,
        tokens=sum(map(len, received.tokens)),
        server_cpu_s=server_cpu_s,
        caller_cpu_s=caller_cpu_s,
        first_token_p50_ms=_ms(first, 0.50),
        first_token_p99_ms=_ms(first, 0.99),
        inter_token_p50_ms=_ms(gaps, 0.50),
        inter_token_p99_ms=_ms(gaps, 0.99),
    )


def _ms(ordered: list[float], share: float) -> float | None:
    return percentile(ordered, share) * _MS if ordered else None
