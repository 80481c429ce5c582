import signal
from collections.abc import Iterator

import pytest

from harness import stray_processes


def pytest_configure() -> None:
    # Ends the run in order, servers included, as Ctrl-C does; else a job's time limit would leave engines behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind_by_the_run() -> Iterator[None]:
    yield
    assert not stray_processes(of_all=True), "processes of a server that has ended are alive"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert not stray_processes(), "processes of a server that has ended are alive"
