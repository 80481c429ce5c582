"""Puts a workload on a server and reports what happened, also when it ends early."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from tokenwire._bench.drivers import Driver, driver
from tokenwire._bench.process_usage import cpu_seconds, resident_bytes
from tokenwire._bench.recording import RequestRecord, Summary, end_to_end, gaps, times_to_first
from tokenwire._bench.workload import Mode, Request, Workload, requests_of
from tokenwire._client import AsyncClient
from tokenwire._engine_info import EngineInfo
from tokenwire._sampling_params import SamplingParams

_Number = TypeVar("_Number", int, float)

_MICROSECONDS = 1e6
_FALLBACK_VOCABULARY = 1_000
"""Ids to draw prompts from where the server does not tell its vocabulary."""


class WorkloadError(ValueError):
    """The server cannot run this workload."""


class ProcessCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a process used during the run."""

    pid: int
    cpu_us_per_token: float | None
    """CPU time for each output token, in microseconds. None: there was no token, or the process is gone."""
    memory_bytes: int | None
    """Memory at the end. None: the process is gone."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found. Of a run that ended early, what had been measured until then."""

    target: str
    model: str | None
    workload: Workload
    error: str | None
    """Why the run ended early. None: it did not."""
    wall_s: float
    requests_started: int
    requests_completed: int
    prompt_tokens: int
    """Of the completed requests."""
    output_tokens: int
    """Received, also those of requests that did not end."""
    requests_per_s: float
    output_tokens_per_s: float
    time_to_first_token_ms: Summary | None
    """None where nothing was measured, and for unary calls."""
    inter_token_ms: Summary | None
    """Between messages that follow each other in a request. None where nothing was measured, and for unary calls."""
    end_to_end_ms: Summary | None
    caller: ProcessCost | None
    """This process: benchmark and client. None: the run ended before it began."""
    server: ProcessCost | None
    """The server's own process, without the engine's. None: not known."""


class BenchRun:
    """One run. `report` may be called at any time."""

    def __init__(
        self, connect: Callable[[], AsyncClient], workload: Workload, *, server_pid: int | None, caller_pid: int
    ) -> None:
        """Make a run; `connect` makes clients of the server."""
        self.workload = workload
        self.records: list[RequestRecord] = []
        self.completed = 0
        self._connect = connect
        self._info: EngineInfo | None = None
        self._pids = {"caller": caller_pid} | ({} if server_pid is None else {"server": server_pid})
        self._cpu: dict[str, float] = {}
        self._started: float | None = None
        self._ended: float | None = None

    async def run(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Run to the end. Raises TokenwireError for the first request that fails, which ends the others, and WorkloadError.

        Args:
            on_start: called when the measurement begins, after the warm-up.

        """
        async with self._connect() as client:
            self._info = await client.engine_info()
        self._check_length(self._info)
        requests = requests_of(self.workload, self._info.vocab_size or _FALLBACK_VOCABULARY)
        async with driver(self.workload.mode, self._connect(), self._sampling) as sender:
            for _ in range(self.workload.warmup):
                request = next(requests)
                await sender.run(request, RequestRecord(len(request.prompt_token_ids)))
            on_start()
            self._cpu = {
                name: cpu for name, pid in self._pids.items() if (cpu := _or_none(cpu_seconds, pid)) is not None
            }
            self._started = time.perf_counter()
            try:
                await self._send_all(sender, requests)
            except BaseExceptionGroup as group:
                raise _first(group) from None
            finally:
                self._ended = time.perf_counter()

    def report(self, error: str | None = None) -> Report:
        """Sum up what there is."""
        started = self._started or time.perf_counter()
        wall = (self._ended or time.perf_counter()) - started
        ended = [record for record in self.records if record.ended is not None]
        tokens = sum(record.count for record in self.records)
        # All of a unary answer comes at once: no first token that one could wait for.
        streamed = [] if self.workload.mode is Mode.UNARY else self.records
        return Report(
            target=self._connect().target,
            model=None if self._info is None else self._info.model,
            workload=self.workload,
            error=error,
            wall_s=wall,
            requests_started=len(self.records),
            requests_completed=len(ended),
            prompt_tokens=sum(record.prompt_tokens for record in ended),
            output_tokens=tokens,
            requests_per_s=len(ended) / wall if wall else 0.0,
            output_tokens_per_s=tokens / wall if wall else 0.0,
            time_to_first_token_ms=Summary.of(times_to_first(streamed)),
            inter_token_ms=Summary.of(gaps(streamed)),
            end_to_end_ms=Summary.of(end_to_end(ended)),
            caller=self._cost("caller", tokens),
            server=self._cost("server", tokens),
        )

    def _check_length(self, info: EngineInfo) -> None:
        longest = self.workload.prompt_tokens.most + self.workload.output_tokens.most
        if info.max_model_len is not None and longest > info.max_model_len:
            raise WorkloadError(
                f"prompt and output of up to {longest} tokens do not fit this model's context of {info.max_model_len}"
            )

    def _sampling(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=self.workload.ignore_eos,
            logprobs=self.workload.logprobs,
        )

    async def _send_all(self, sender: Driver, requests: Iterator[Request]) -> None:
        if self.workload.rate is None:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.workload.concurrency or 1):
                    group.create_task(self._send_in_turn(sender, requests))
        else:
            await self._send_at_random_times(sender, requests, self.workload.rate)

    async def _send_in_turn(self, sender: Driver, requests: Iterator[Request]) -> None:
        while self._goes_on():
            await self._send(sender, next(requests))

    async def _send_at_random_times(self, sender: Driver, requests: Iterator[Request], rate: float) -> None:
        limit = self.workload.concurrency
        places = None if limit is None else asyncio.Semaphore(limit)
        source = random.Random(self.workload.seed)  # noqa: S311  # benchmark traffic, not secrets
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while self._goes_on():
                group.create_task(self._send(sender, next(requests), places))
                due += source.expovariate(rate)
                await asyncio.sleep(due - time.perf_counter())

    async def _send(self, sender: Driver, request: Request, places: asyncio.Semaphore | None = None) -> None:
        # Its time counts from here: the wait for a free place is part of what a caller would see.
        record = RequestRecord(len(request.prompt_token_ids))
        self.records.append(record)
        async with places or contextlib.nullcontext():
            await sender.run(request, record)
        record.end()
        self.completed += 1

    def _goes_on(self) -> bool:
        """Whether another request may start."""
        requests, duration = self.workload.requests, self.workload.duration_s
        return (requests is None or len(self.records) < requests) and (
            duration is None or self._started is None or time.perf_counter() - self._started < duration
        )

    def _cost(self, name: str, tokens: int) -> ProcessCost | None:
        pid, before = self._pids.get(name), self._cpu.get(name)
        if pid is None or before is None:
            return None
        after = _or_none(cpu_seconds, pid)
        return ProcessCost(
            pid=pid,
            cpu_us_per_token=(after - before) / tokens * _MICROSECONDS if tokens and after is not None else None,
            memory_bytes=_or_none(resident_bytes, pid),
        )


def _or_none(measure: Callable[[int], _Number], pid: int) -> _Number | None:
    """Measure a process, if it is still there."""
    try:
        return measure(pid)
    except OSError:
        return None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Give the error that ended a group of tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
