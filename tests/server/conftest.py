from collections.abc import AsyncIterator

import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, make_config


@pytest.fixture(scope="session")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return make_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def server(vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(vllm_config) as running:
        yield running
