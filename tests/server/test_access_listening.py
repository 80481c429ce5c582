"""What is open to whom from the start: file modes, warnings, and options and files that are wrong."""

import contextlib
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fake_engine import within
from harness.certificates import Authority
from tokenwire_server.config import ExitCode, ServerConfig
from tokenwire_server.engine.engine import Engine
from tokenwire_server.process.arguments import parse
from tokenwire_server.process.server import Server
from tokenwire_server.services.engine import service
from tokenwire_server.services.host import Host
from tokenwire_server.transport.server import Transport
from tokenwire_server.transport.unix_socket import BindError

TOKEN = "alice-token-0123456789"  # noqa: S105  # of the tests
EVERYWHERE = "0.0.0.0"  # noqa: S104  # what the warnings are about


@pytest.fixture
def folder() -> Iterator[Path]:
    # Socket paths are short; pytest's own folders may not be.
    with tempfile.TemporaryDirectory(prefix="tokenwire-") as path:
        yield Path(path)


@contextlib.asynccontextmanager
async def listening(config: ServerConfig) -> AsyncIterator[Transport]:
    transport = Transport(config, [service(Host(config))])
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop(0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("wanted", [None, 0o600, 0o660, 0o666])
async def test_the_file_mode_of_a_unix_socket(folder: Path, umask: int, wanted: int | None) -> None:
    path = folder / "socket"
    config = ServerConfig(uds=str(path)) if wanted is None else ServerConfig(uds=str(path), uds_mode=wanted)
    before = os.umask(umask)
    try:
        async with listening(config) as transport:
            assert mode(path) == (0o600 if wanted is None else wanted)
            async with grpc.aio.insecure_channel(transport.address) as channel:
                await within(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()))
        assert os.umask(umask) == umask
    finally:
        os.umask(before)


async def test_tokens_on_a_unix_socket(folder: Path) -> None:
    (folder / "tokens").write_text(TOKEN)
    config = ServerConfig(uds=str(folder / "socket"), token_file=str(folder / "tokens"), open_services=())
    async with listening(config) as transport, grpc.aio.insecure_channel(transport.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await within(stub.Check(health_pb2.HealthCheckRequest()))
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        await within(stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata))


async def test_a_server_that_is_open_to_the_world_warns(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = Authority().server().write(folder, "server")
    token_file = folder / "tokens"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    plain = ServerConfig(host=EVERYWHERE, port=0)
    tokens = ServerConfig(host=EVERYWHERE, port=0, token_file=str(token_file))
    tls = ServerConfig(host=EVERYWHERE, port=0, tls_cert=cert, tls_key=key)
    loopback = [ServerConfig(port=0), ServerConfig(host="localhost", port=0), ServerConfig(uds=str(folder / "socket"))]
    for config, text in [
        (plain, "without TLS and without tokens"),
        (tokens, "without TLS: tokens and requests can be read"),
        (tls, ""),
        *((config, "") for config in loopback),
    ]:
        caplog.clear()
        async with listening(config):
            assert text in caplog.text
            assert bool(text) is bool(caplog.records)


async def run_to_its_end(config: ServerConfig) -> int:
    def load() -> Engine:
        raise AssertionError("must not be loaded")

    return await within(Server(config, "model", load).run())


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_client_ca", "token_file"])
async def test_a_wrong_file_ends_the_start_with_one_line_and_exit_code_3(
    folder: Path, field: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cert, key = Authority().server().write(folder, "server")
    files: dict[str, Any] = {"tls_cert": cert, "tls_key": key, "tls_client_ca": cert, field: str(folder / "none")}
    config = ServerConfig(port=0, **files)
    assert await run_to_its_end(config) == ExitCode.STARTUP
    option = field.replace("_", "-")
    assert capfd.readouterr().err == f"tokenwire: error: --{option} {folder}/none: No such file or directory\n"


async def test_a_taken_port_with_tls(folder: Path) -> None:
    cert, key = Authority().server().write(folder, "server")
    async with listening(ServerConfig(port=0)) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with listening(ServerConfig(port=port, tls_cert=cert, tls_key=key)):
                pass


def test_the_options() -> None:
    arguments = ["--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a", "--token-file", "t"]
    config = parse(["some/model", *arguments, "--open-services", "health,reflection"]).server
    assert (config.tls_cert, config.tls_key, config.tls_client_ca, config.token_file) == ("c", "k", "a", "t")
    assert config.open_services == ("health", "reflection")
    assert parse(["some/model", "--token-file", "t"]).server.open_services == ("health",)
    assert parse(["some/model", "--token-file", "t", "--open-services", "none"]).server.open_services == ()
    assert parse(["some/model", "--uds", "s", "--uds-mode", "0660"]).server.uds_mode == 0o660
    assert parse(["some/model", "--max-requests-per-client", "8"]).server.max_requests_per_client == 8


@pytest.mark.parametrize(
    "argv",
    [
        ["--tls-cert", "c"],
        ["--tls-key", "k"],
        ["--tls-client-ca", "a"],
        ["--open-services", "health"],
        ["--token-file", "t", "--open-services", "admin"],
        ["--token-file", "t", "--open-services", ""],
        ["--uds-mode", "0600"],
        ["--uds", "s", "--uds-mode", "rw"],
        ["--uds", "s", "--uds-mode", "7777"],
        ["--max-requests-per-client", "0"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["some/model", *argv])
    assert caught.value.code == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1
