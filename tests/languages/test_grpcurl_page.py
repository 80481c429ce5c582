"""What docs/grpcurl.md tells people to type prints what it shows; other parts of the page are in tests/server."""

import asyncio
from pathlib import Path

import pytest

from harness.pages import ADDRESS, GRPCURL_ON_A_SPECIAL_SERVER, GRPCURL_PAGE, Block, bash_blocks, check_block
from harness.simulated import Simulated, within

ABORT = "Abort from another shell"
BLOCKS = [block for block in bash_blocks(GRPCURL_PAGE) if block.heading not in GRPCURL_ON_A_SPECIAL_SERVER]


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.heading != ABORT], ids=lambda block: block.heading.replace(" ", "-")
)
def test_commands(block: Block, simulated: Simulated, tmp_path: Path) -> None:
    check_block(block, tmp_path, {ADDRESS: simulated.address})


async def test_abort_from_another_shell(simulated: Simulated, tmp_path: Path) -> None:
    request, abort = (block for block in BLOCKS if block.heading == ABORT)
    address = {ADDRESS: simulated.address}
    first = asyncio.create_task(asyncio.to_thread(check_block, request, tmp_path, address))
    await simulated.running("night-3")
    await asyncio.to_thread(check_block, abort, tmp_path, address)
    await within(first)
    await simulated.gone("night-3")
