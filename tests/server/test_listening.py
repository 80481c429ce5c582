"""Where the server listens, and what it says where it cannot."""

import pathlib
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fake_engine import within
from tokenwire_server.config import ServerConfig
from tokenwire_server.services.engine import service
from tokenwire_server.services.host import Host
from tokenwire_server.transport import unix_socket
from tokenwire_server.transport.server import Transport
from tokenwire_server.transport.unix_socket import BindError


@pytest.fixture
def path() -> Iterator[pathlib.Path]:
    # Socket paths are short; pytest's own folders may not be.
    with tempfile.TemporaryDirectory(prefix="tokenwire-") as folder:
        yield pathlib.Path(folder) / "socket"


@pytest.fixture
async def make() -> AsyncIterator[Callable[[ServerConfig], Transport]]:
    made: list[Transport] = []

    def transport(config: ServerConfig) -> Transport:
        made.append(Transport(config, [service(Host(config))]))
        return made[-1]

    yield transport
    for one in made:
        await one._server.stop(0)


async def answers(address: str) -> bool:
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        response = await within(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()))
        return bool(response.status == health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_the_system_chooses_a_port_on_loopback(make: Callable[[ServerConfig], Transport]) -> None:
    transport = make(ServerConfig(port=0))
    await transport.start()
    host, _, port = transport.address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert await answers(transport.address)


async def test_ipv6(make: Callable[[ServerConfig], Transport]) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    transport = make(ServerConfig(host="::1", port=0))
    await transport.start()
    assert transport.address.startswith("[::1]:")
    assert await answers(transport.address)


async def test_a_taken_port(make: Callable[[ServerConfig], Transport]) -> None:
    first = make(ServerConfig(port=0))
    await first.start()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}"):
        await make(ServerConfig(port=port)).start()
    assert await answers(first.address)


async def test_an_address_of_another_machine(make: Callable[[ServerConfig], Transport]) -> None:
    with pytest.raises(BindError, match=r"cannot listen on 192\.0\.2\.1:"):
        await make(ServerConfig(host="192.0.2.1", port=0)).start()


async def test_a_unix_socket(make: Callable[[ServerConfig], Transport], path: pathlib.Path) -> None:
    transport = make(ServerConfig(uds=str(path)))
    await transport.start()
    assert transport.address == f"unix:{path}"
    assert await answers(transport.address)
    await transport.stop(0)
    assert not path.exists()  # noqa: ASYNC240  # nothing else runs meanwhile


async def test_the_socket_of_a_dead_server_is_replaced(
    make: Callable[[ServerConfig], Transport], path: pathlib.Path
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    transport = make(ServerConfig(uds=str(path)))
    await transport.start()
    assert await answers(transport.address)


async def test_the_socket_of_a_live_server_is_left_alone(
    make: Callable[[ServerConfig], Transport], path: pathlib.Path
) -> None:
    first = make(ServerConfig(uds=str(path)))
    await first.start()
    with pytest.raises(BindError, match="another server is listening"):
        await make(ServerConfig(uds=str(path))).start()
    assert await answers(first.address)


async def test_the_socket_of_a_server_that_takes_no_connection_is_left_alone(
    make: Callable[[ServerConfig], Transport], path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped in a debugger, for example; the start does not hang with it."""
    monkeypatch.setattr(unix_socket, "_PROBE_TIMEOUT", 0.01)
    with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as waiting:
        stopped.bind(str(path))
        stopped.listen(0)
        waiting.connect(str(path))
        with pytest.raises(BindError, match="another server is listening"):
            await make(ServerConfig(uds=str(path))).start()
        assert path.is_socket()  # noqa: ASYNC240  # nothing else runs meanwhile


async def test_a_successor_keeps_its_socket(make: Callable[[ServerConfig], Transport], path: pathlib.Path) -> None:
    """FAULTS C19: the path was given to another server meanwhile."""
    first = make(ServerConfig(uds=str(path)))
    await first.start()
    path.unlink()  # noqa: ASYNC240  # nothing else runs meanwhile
    second = make(ServerConfig(uds=str(path)))
    await second.start()
    await first.stop(0)
    assert await answers(second.address)
    await second.stop(0)
    assert not any(path.parent.iterdir())  # nothing else runs meanwhile


@pytest.fixture
def precious(path: pathlib.Path) -> Iterator[pathlib.Path]:
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


async def test_a_file_that_is_no_socket_is_left_alone(
    make: Callable[[ServerConfig], Transport], precious: pathlib.Path
) -> None:
    with pytest.raises(BindError, match="not a socket"):
        await make(ServerConfig(uds=str(precious))).start()


async def test_a_socket_in_a_folder_that_does_not_exist(
    make: Callable[[ServerConfig], Transport], path: pathlib.Path
) -> None:
    """FAULTS C5."""
    with pytest.raises(BindError, match=r"the folder .*/none does not exist"):
        await make(ServerConfig(uds=str(path.parent / "none" / "socket"))).start()


async def test_a_socket_path_that_is_too_long(make: Callable[[ServerConfig], Transport], path: pathlib.Path) -> None:
    with pytest.raises(BindError, match=r"the path is too long: .* of at most 107"):
        await make(ServerConfig(uds=str(path.parent / ("x" * 200)))).start()


async def test_a_socket_path_that_no_file_system_takes(
    make: Callable[[ServerConfig], Transport], path: pathlib.Path
) -> None:
    with pytest.raises(BindError):
        await make(ServerConfig(uds=str(path.parent / ("x" * 5000)))).start()
