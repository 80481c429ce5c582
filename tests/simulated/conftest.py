from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest

from harness.simulated import Simulated, serving
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """A shared server whose outputs take the direct path."""
    with serving(tmp_path_factory.mktemp("direct"), "--slow-reader-timeout", "2") as simulated:
        yield simulated


@pytest.fixture(scope="session")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """A shared server whose outputs take vLLM's ordinary path."""
    arguments = ["--slow-reader-timeout", "2", "--no-direct-path"]
    with serving(tmp_path_factory.mktemp("ordinary"), *arguments) as simulated:
        yield simulated


@pytest.fixture
def simulated(request: pytest.FixtureRequest) -> Simulated:
    """The shared server on the direct path, or the one that `both_paths` asks for."""
    server: Simulated = request.getfixturevalue(getattr(request, "param", "direct"))
    return server


@pytest.fixture
async def channel(simulated: Simulated) -> AsyncIterator[grpc.aio.Channel]:
    async with simulated.connect() as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> EngineServiceStub:
    return EngineServiceStub(channel)
