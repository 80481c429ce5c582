"""Detects that the engine has died: its process has exited, or it no longer responds."""

import asyncio
import logging
import time
from enum import Enum

from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError

logger = logging.getLogger(__name__)

_INTERVAL = 0.5
"""Seconds between checks of the engine process."""


class Death(Enum):
    """How an engine ended."""

    DIED = "the engine has died"
    HUNG = "the engine does not respond and is considered dead (--engine-timeout)"


def has_died(engine: Engine) -> bool:
    """Return whether the engine is known to have died."""
    try:
        engine.check_alive()
    except RequestError:
        return True
    return False


async def wait_for_death(engine: Engine, timeout: float) -> Death:  # noqa: ASYNC109  # limits the engine's step
    """Wait until the engine has died or does not respond.

    Args:
        engine: the engine.
        timeout: maximum seconds for the engine to respond to a probe, which it does between two steps; 0 disables
            probes.

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
            await engine.wait_for_failure(_INTERVAL)
    finally:
        if probe is not None:
            probe.cancel()
