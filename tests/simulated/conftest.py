from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest

from harness.simulated import Simulated, serving
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub


@pytest.fixture(scope="session", params=["direct", "ordinary"])
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """A shared server, once for each of the two ways that outputs take."""
    path: list[str] = [] if request.param == "direct" else ["--no-direct-path"]
    with serving(tmp_path_factory.mktemp(request.param), "--slow-reader-timeout", "2", *path) as simulated:
        yield simulated


@pytest.fixture
async def channel(simulated: Simulated) -> AsyncIterator[grpc.aio.Channel]:
    async with simulated.connect() as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> EngineServiceStub:
    return EngineServiceStub(channel)
