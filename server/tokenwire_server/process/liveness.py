"""Whether the engine lives: its process is there, and it answers."""

import asyncio
import logging
import time
from enum import Enum

from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError

logger = logging.getLogger(__name__)

_INTERVAL = 0.5
"""Seconds between looks at the engine process."""


class Death(Enum):
    """How an engine ended."""

    DIED = "the engine has died"
    HUNG = "the engine does not answer; it counts as dead (--engine-timeout)"


def has_died(engine: Engine) -> bool:
    """Return whether the engine is known to have died."""
    try:
        engine.check_alive()
    except RequestError:
        return True
    return False


async def wait_for_death(engine: Engine, timeout: float) -> Death:  # noqa: ASYNC109  # it limits the engine, not this
    """Wait until the engine has died or hangs.

    Args:
        engine: the engine.
        timeout: maximum seconds until the engine answers a probe, which it does between two steps; 0: it is not probed.

    Returns:
        How the engine ended.

    """
    probe: asyncio.Task[None] | None = None
    asked = time.monotonic()
    try:
        while True:
            if has_died(engine):
                return Death.DIED
            now = time.monotonic()
            if probe is None or probe.done():
                if timeout and now - asked > timeout / 4:
                    probe, asked = asyncio.create_task(engine.probe()), now
            elif now - asked > timeout:
                return Death.HUNG
            await asyncio.sleep(_INTERVAL)
    finally:
        if probe is not None:
            probe.cancel()
