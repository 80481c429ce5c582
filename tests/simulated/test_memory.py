"""Streams that their callers leave cost no memory, on either side. FIELD_LOG 6, 7.

2,000 streams in the suite; `make soak` sets TOKENWIRE_SOAK_STREAMS to 50,000.
"""

import asyncio
import gc
import os

import psutil
import pytest

import tokenwire
from harness.simulated import Simulated, until

STREAMS = int(os.environ.get("TOKENWIRE_SOAK_STREAMS", "2000"))
AT_A_TIME = 32

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(120 + STREAMS / 50)]

ROUNDS = 3
ALLOWED = 2 * 2**20
"""Bytes of an allocator's noise in a round; a stream that stayed would cost kilobytes, a round's hundreds more than this."""


async def leave(client: tokenwire.AsyncClient, count: int) -> None:
    """Start streams and leave each after its first tokens."""
    params = tokenwire.SamplingParams(max_tokens=1000, ignore_eos=True)
    left = iter(range(count))

    async def caller() -> None:
        for _ in left:
            async with client.stream(range(100, 228), params) as deltas:
                async for _ in deltas:
                    break

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(caller())


async def test_streams_that_are_left_cost_no_memory(simulated: Simulated) -> None:
    """What stays of streams makes every round larger; an allocator's new arena, one or two of them."""
    processes = psutil.Process(simulated.server.pid), psutil.Process()
    grown: list[list[int]] = []
    async with tokenwire.AsyncClient(simulated.address) as client:
        await leave(client, 1000)
        for _ in range(ROUNDS):
            before = [process.memory_info().rss for process in processes]
            await leave(client, STREAMS // ROUNDS)
            gc.collect()
            grown.append([process.memory_info().rss - size for process, size in zip(processes, before, strict=True)])
    await until(lambda: not simulated.held())
    server, client_process = (min(round_ / 2**20 for round_ in rounds) for rounds in zip(*grown, strict=True))
    # Each outcome that is kept for a late abort takes 200 bytes.
    assert server < (ALLOWED + 300 * STREAMS // ROUNDS) / 2**20, f"the server grows by {server:.1f} MiB a round"
    assert client_process < ALLOWED / 2**20, f"the client grows by {client_process:.1f} MiB a round"
