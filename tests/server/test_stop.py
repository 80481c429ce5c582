"""A clean stop is no failure: nothing in the log says so."""

import logging

import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer


@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
@pytest.mark.parametrize("running", [0, 3])
async def test_a_closed_engine_logs_no_error(
    vllm_config: VllmConfig, caplog: pytest.LogCaptureFixture, running: int, direct_path: bool
) -> None:
    # vLLM's loggers pass nothing on to the root's.
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    try:
        async with FakeEngineServer.run(vllm_config, direct_path=direct_path) as server:
            await server.check_alive()
            calls = [server.stream() for _ in range(running)]
            await server.core.next_requests(running)
            await server.engine.close()
            assert server.core.was_shut_down
            for call in calls:
                call.cancel()
    finally:
        vllm_logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
