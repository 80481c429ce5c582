"""Runs a workload against a server and reports the result, also of a run that ended early."""

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
"""Number of token ids to draw prompts from if the server does not report the size of its vocabulary."""


class WorkloadError(ValueError):
    """The server cannot run this workload."""


class ProcessCost(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that a process used during the run."""

    pid: int
    cpu_us_per_token: float | None
    """CPU time per output token, in microseconds. None: no tokens, or the process has exited."""
    memory_bytes: int | None
    """Resident memory at the end, in bytes. None: the process has exited."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run; of one that ended early, what was measured until then."""

    target: str
    model: str | None
    workload: Workload
    error: str | None
    """Why the run ended early. None: it was complete."""
    wall_s: float
    requests_started: int
    requests_completed: int
    prompt_tokens: int
    """Prompt tokens of the completed requests."""
    output_tokens: int
    """Received output tokens, including those of requests that were not completed."""
    requests_per_s: float
    output_tokens_per_s: float
    time_to_first_token_ms: Summary | None
    """From the start of a request to its first token. None: nothing was measured, or unary calls."""
    inter_token_ms: Summary | None
    """Between consecutive messages of a request. None: nothing was measured, or unary calls."""
    end_to_end_ms: Summary | None
    """From the start to the end of a request. None: nothing was measured."""
    caller: ProcessCost | None
    """This process: benchmark and client. None: the run ended before the measurement began."""
    server: ProcessCost | None
    """The server's own process, without the engine's. None: unknown."""


class BenchRun:
    """One run. `report` may be called at any time."""

    def __init__(
        self, connect: Callable[[], AsyncClient], workload: Workload, *, server_pid: int | None, caller_pid: int
    ) -> None:
        """Make a run.

        Args:
            connect: makes a client of the server.
            workload: the requests to send.
            server_pid: the server's process. None: unknown.
            caller_pid: this process.

        """
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
        """Run the workload to its end.

        Args:
            on_start: called when the measurement begins, after the warm-up.

        Raises:
            WorkloadError: the server cannot run this workload.
            TokenwireError: a request failed, which ended the run.

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
                raise _first_error(group) from None
            finally:
                self._ended = time.perf_counter()

    def report(self, error: str | None = None) -> Report:
        """Make the report of what has been measured so far. `error` is why the run ended early."""
        started = self._started or time.perf_counter()
        wall = (self._ended or time.perf_counter()) - started
        ended = [record for record in self.records if record.ended is not None]
        tokens = sum(record.count for record in self.records)
        # A unary response arrives as a whole: it has no time to first token.
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
                f"prompt and output of up to {longest} tokens exceed this model's context of {info.max_model_len}"
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
        while self._continues():
            await self._send(sender, next(requests))

    async def _send_at_random_times(self, sender: Driver, requests: Iterator[Request], rate: float) -> None:
        limit = self.workload.concurrency
        slots = None if limit is None else asyncio.Semaphore(limit)
        source = random.Random(self.workload.seed)  # noqa: S311  # benchmark traffic, not secrets
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while self._continues():
                group.create_task(self._send(sender, next(requests), slots))
                due += source.expovariate(rate)
                await asyncio.sleep(due - time.perf_counter())

    async def _send(self, sender: Driver, request: Request, slots: asyncio.Semaphore | None = None) -> None:
        # The time counts from here: a caller would also see the wait for a free slot.
        record = RequestRecord(len(request.prompt_token_ids))
        self.records.append(record)
        async with slots or contextlib.nullcontext():
            await sender.run(request, record)
        record.end()
        self.completed += 1

    def _continues(self) -> bool:
        """Whether to start another request."""
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
    """Measure a process. None: it has exited."""
    try:
        return measure(pid)
    except OSError:
        return None


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended a group of tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
