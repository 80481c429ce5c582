"""The caller process of a contender: `python -m bench.caller NAME ADDRESS SERVER_PID`.

Prints "ready" once it is connected, then reads commands from stdin and writes one answer each to stdout, as lines of
JSON. A SERVER_PID of 0 means that the caller runs the engine itself.
"""

import asyncio
import gc
import os
import sys
import time
from typing import Any, TypeAlias

import msgspec
import uvloop

from bench import contenders
from bench.cases import Case
from bench.contenders.base import CancellingContender, Contender
from bench.measure import MemoryGrowth, Received, Sample, sample
from tokenwire._bench.process_usage import cpu_seconds, resident_bytes

ANSWER_PREFIX = "answer: "
"""Distinguishes answers from the lines that vLLM writes to stdout."""
_SETTLE_TIME = 0.05
"""Seconds after the last token during which the server's clean-up is still measured."""
_CANCEL_CONCURRENCY = 64
_CANCEL_PROMPT_TOKENS = 32


class RunCase(msgspec.Struct, tag=True):
    """Command: run a case; the answer is a Sample."""

    case: Case
    seed: int


class CancelStreams(msgspec.Struct, tag=True):
    """Command: open and cancel streams; the answer is a MemoryGrowth."""

    streams: int


Command: TypeAlias = RunCase | CancelStreams


class Failure(msgspec.Struct, tag=True):
    """Answer: the command raised an exception."""

    message: str


async def _run(contender: Contender, server_pid: int, command: RunCase) -> Sample:
    prompts = command.case.prompts(command.seed)
    # Garbage of the previous case must not count for this one.
    gc.collect()
    server_cpu, caller_cpu = cpu_seconds(server_pid), cpu_seconds(os.getpid())
    received = Received(len(prompts))
    await contender.run(command.case, prompts, received)
    wall = time.perf_counter() - received.started
    await asyncio.sleep(_SETTLE_TIME)
    server_cpu, caller_cpu = cpu_seconds(server_pid) - server_cpu, cpu_seconds(os.getpid()) - caller_cpu
    received.check(command.case, prompts)
    return sample(command.case, received, wall_s=wall, server_cpu_s=server_cpu, caller_cpu_s=caller_cpu)


async def _cancel(contender: CancellingContender, server_pid: int, command: CancelStreams) -> MemoryGrowth:
    prompt = list(range(1_000, 1_000 + _CANCEL_PROMPT_TOKENS))
    # Warm-up: the first streams fill pools and caches.
    await contender.cancel(prompt, max(command.streams // 10, 500), _CANCEL_CONCURRENCY)
    server, caller = [resident_bytes(server_pid)], [resident_bytes(os.getpid())]
    for _ in range(4):
        await contender.cancel(prompt, command.streams // 4, _CANCEL_CONCURRENCY)
        await asyncio.sleep(_SETTLE_TIME)
        server.append(resident_bytes(server_pid))
        caller.append(resident_bytes(os.getpid()))
    return MemoryGrowth(streams=command.streams, server=server, caller=caller)


async def _answer(contender: Any, server_pid: int, command: Command) -> Sample | MemoryGrowth | Failure:
    try:
        if isinstance(command, RunCase):
            return await _run(contender, server_pid, command)
        return await _cancel(contender, server_pid, command)
    except Exception as error:  # noqa: BLE001  # the runner reports it
        return Failure(f"{type(error).__name__}: {error}")


async def _main(name: str, address: str, server_pid: int) -> None:
    contender = contenders.load(name)
    await contender.open(address)
    try:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            command = msgspec.json.decode(line, type=Command)
            answer = await _answer(contender, server_pid or os.getpid(), command)
            print(ANSWER_PREFIX + msgspec.json.encode(answer).decode(), flush=True)
    finally:
        await contender.close()


if __name__ == "__main__":
    # The in-process engine runs on uvloop like a server, a caller on asyncio's event loop.
    runner = uvloop.run if sys.argv[1] == contenders.IN_PROCESS else asyncio.run
    runner(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
