"""Scenarios of FIELD_LOG that have no other place."""

import asyncio
import sys

from fake_engine import FakeEngineServer

FORK = """
import os, signal, sys
import tokenwire

def in_child(function):
    if (child := os.fork()) == 0:
        signal.alarm(30)
        function()
        os._exit(0)
    print("exit code", os.waitpid(child, 0)[1], flush=True)

def use_another():
    with tokenwire.Client(sys.argv[1]) as client:
        print("another", client.generate([1], timeout=20).token_ids, flush=True)

def use_inherited():
    try:
        client.generate([1], timeout=20)
    except tokenwire.ClientClosedError:
        print("closed", flush=True)

# The import alone starts nothing of gRPC's.
in_child(use_another)
client = tokenwire.Client(sys.argv[1])
print("parent", client.generate([1], timeout=20).token_ids, flush=True)
in_child(use_inherited)
print("parent", client.generate([1], timeout=20).token_ids, flush=True)
client.close()
"""


async def test_a_child_makes_its_own_client_and_is_told_where_it_uses_an_inherited_one(
    server: FakeEngineServer,
) -> None:
    """FIELD_LOG 13. Once a process has used gRPC, its forks cannot: gRPC hangs in them; such a process spawns."""
    server.core.answer = [5]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORK, server.transport.address, stdout=asyncio.subprocess.PIPE
    )
    try:
        stdout, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = ["another [5]", "exit code 0", "parent [5]", "closed", "exit code 0", "parent [5]"]
    assert stdout.decode().splitlines() == lines
