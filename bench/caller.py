"""A contender's caller, in a process of its own: `python -m bench.caller NAME ADDRESS SERVER_PID`.

Answers "ready" once it is connected, then each line of JSON on the standard input by one on the standard output. A
server's process id of 0 means that the caller is the server.
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
from bench.contenders.base import CancelsStreams, Contender
from bench.measure import Memory, Sample, Seen, sample
from tokenwire._bench.process_usage import cpu_seconds, resident_bytes

_SETTLE = 0.05
"""Seconds after the last token for the server to clean up, which is part of its cost."""
_CANCEL_CONCURRENCY = 64
_CANCEL_PROMPT_TOKENS = 32


class RunCase(msgspec.Struct, tag=True):
    """Run a case; the answer is a Sample."""

    case: Case
    seed: int


class CancelStreams(msgspec.Struct, tag=True):
    """Open and cancel streams; the answer is a Memory."""

    streams: int


Command: TypeAlias = RunCase | CancelStreams


class Failure(msgspec.Struct, tag=True):
    """The answer where something raised."""

    message: str


async def _run(contender: Contender, server_pid: int, command: RunCase) -> Sample:
    prompts = command.case.prompts(command.seed)
    # What the last case left is not this one's cost.
    gc.collect()
    server_cpu, caller_cpu = cpu_seconds(server_pid), cpu_seconds(os.getpid())
    seen = Seen(len(prompts))
    await contender.run(command.case, prompts, seen)
    wall = time.perf_counter() - seen.started
    await asyncio.sleep(_SETTLE)
    server_cpu, caller_cpu = cpu_seconds(server_pid) - server_cpu, cpu_seconds(os.getpid()) - caller_cpu
    seen.check(command.case, prompts)
    return sample(command.case, seen, wall_s=wall, server_cpu_s=server_cpu, caller_cpu_s=caller_cpu)


async def _cancel(contender: CancelsStreams, server_pid: int, command: CancelStreams) -> Memory:
    prompt = list(range(1_000, 1_000 + _CANCEL_PROMPT_TOKENS))
    # The first ones fill pools and caches.
    await contender.cancel(prompt, max(command.streams // 10, 500), _CANCEL_CONCURRENCY)
    server, caller = [resident_bytes(server_pid)], [resident_bytes(os.getpid())]
    for _ in range(4):
        await contender.cancel(prompt, command.streams // 4, _CANCEL_CONCURRENCY)
        await asyncio.sleep(_SETTLE)
        server.append(resident_bytes(server_pid))
        caller.append(resident_bytes(os.getpid()))
    return Memory(streams=command.streams, server=server, caller=caller)


async def _answer(contender: Any, server_pid: int, command: Command) -> Sample | Memory | Failure:
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
        # vLLM's processes write to the standard output too; the runner looks for this mark.
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            command = msgspec.json.decode(line, type=Command)
            answer = await _answer(contender, server_pid or os.getpid(), command)
            print(MARK + msgspec.json.encode(answer).decode(), flush=True)
    finally:
        await contender.close()


MARK = "answer: "
"""Before an answer: vLLM writes to the standard output too."""

if __name__ == "__main__":
    # As a server would; a caller's event loop is asyncio's own.
    runner = uvloop.run if sys.argv[1] == contenders.IN_PROCESS else asyncio.run
    runner(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
