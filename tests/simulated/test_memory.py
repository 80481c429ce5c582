"""Streams that their callers leave cost no memory, on either side. FIELD_LOG 6, 7.

2,000 streams in the suite; `make soak` sets TOKENWIRE_SOAK_STREAMS to 50,000.
"""

import asyncio
import os

import psutil
import pytest

import tokenwire
from harness.simulated import Simulated, until

STREAMS = int(os.environ.get("TOKENWIRE_SOAK_STREAMS", "2000"))
AT_A_TIME = 32

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(120 + STREAMS / 50)]

ALLOWED = 24 * 2**20
"""Bytes of allocator noise; a stream that stayed would cost kilobytes, 2,000 of them more than this."""


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
    server, client_process = psutil.Process(simulated.server.pid), psutil.Process()
    async with tokenwire.AsyncClient(simulated.address) as client:
        await leave(client, 1000)
        before = server.memory_info().rss, client_process.memory_info().rss
        await leave(client, STREAMS)
        grown = [process.memory_info().rss - rss for process, rss in zip((server, client_process), before, strict=True)]
    await until(lambda: not simulated.held())
    # Each outcome that is kept for a late abort takes 200 bytes.
    assert grown[0] < ALLOWED + 300 * STREAMS, f"the server has {grown[0] / 2**20:.0f} MiB more"
    assert grown[1] < ALLOWED, f"the client has {grown[1] / 2**20:.0f} MiB more"
