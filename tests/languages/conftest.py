from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.simulated import Simulated, serving

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.simulated)


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """The server that all clients call."""
    with serving(tmp_path_factory.mktemp("languages")) as simulated:
        yield simulated
