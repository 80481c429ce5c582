"""The performance goals of the project, and what was measured for them."""

from typing import NamedTuple

from bench import contenders
from bench.cases import Case
from bench.contenders import IN_PROCESS, SMG
from bench.results import Figure, Results, caller_us, server_us

_MIB = 1024 * 1024
_MAX_GROWTH_MIB = 2.0
"""Growth in the second half that the allocator causes; growth by streams that are not freed would be larger."""


class Goal(NamedTuple):
    """A goal of the project with its measured value."""

    figure: str
    at_most: float
    measured: float | None
    """None if it was not measured."""
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the measured value meets the goal."""
        return self.measured is not None and self.measured <= self.at_most


def goals(results: Results) -> list[Goal]:
    """Return the goals at the shortest step time, where the front end is the bottleneck."""
    cases = results.plan.cases
    fastest = min(case.step_ms for case in cases)
    load = [case for case in cases if case.step_ms == fastest and not case.unary and case.logprobs is None]
    largest = max(load, key=lambda case: case.concurrency)
    logprobs = next(case for case in cases if case.logprobs is not None)
    long_prompt = next(case for case in cases if case.unary)
    at = f"{largest.concurrency} concurrent"

    def ratio(contender: str, reference: str, figure: Figure, case: Case = largest) -> float | None:
        return results.ratio(case, contender, reference, figure)

    def inter_token_p99(sample: object) -> float | None:
        value: float | None = getattr(sample, "inter_token_p99_ms", None)
        return value

    multiplex, typed, stream = contenders.MULTIPLEX, contenders.TYPED, contenders.STREAM
    found = [
        Goal(f"Multiplex, server CPU per token / smg stream, {at}", 0.18, ratio(multiplex, SMG, server_us)),
        Goal(
            f"Multiplex, server CPU per token / in-process generate, {at}",
            0.60,
            ratio(multiplex, IN_PROCESS, server_us),
        ),
        Goal(f"Multiplex, step view, caller CPU per token / smg caller, {at}", 0.12, ratio(multiplex, SMG, caller_us)),
        Goal(f"Multiplex, typed streams, caller CPU per token / smg caller, {at}", 0.18, ratio(typed, SMG, caller_us)),
        Goal(f"GenerateStream, server CPU per token / smg stream, {at}", 0.65, ratio(stream, SMG, server_us)),
        Goal(
            f"Generate, {long_prompt.prompt_tokens:,}-token prompts, server CPU / smg",
            0.80,
            ratio(contenders.UNARY, SMG, server_us, long_prompt),
        ),
        Goal(
            f"Multiplex, logprobs={logprobs.logprobs}, server CPU per token / smg stream, "
            f"{logprobs.concurrency} concurrent",
            0.22,
            ratio(multiplex, SMG, server_us, logprobs),
        ),
        Goal(f"Multiplex, inter-token p99 / smg, {at}", 1.0, ratio(multiplex, SMG, inter_token_p99)),
    ]
    if (memory := results.memory) is not None:
        grown = max(sizes[4] - sizes[2] for sizes in (memory.server, memory.caller))
        found.append(
            Goal(
                f"Memory growth of server or client in the second half of {memory.streams:,} cancelled streams",
                _MAX_GROWTH_MIB,
                grown / _MIB,
                " MiB",
            )
        )
    return found
