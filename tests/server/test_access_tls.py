"""TLS and mTLS: who can connect, and how the files follow their changes."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from vllm.config import VllmConfig

import tokenwire
from fake_engine import FakeEngineServer, failure_of, within
from harness.certificates import Authority, Pair, encrypted
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire_server.access.files import AccessError
from tokenwire_server.access.tls import TlsFiles
from tokenwire_server.config import ServerConfig

TOKEN = "alice-token-0123456789"  # noqa: S105  # of the tests

Run = Callable[..., contextlib.AbstractAsyncContextManager[FakeEngineServer]]


class Files(NamedTuple):
    cert: Path
    key: Path
    client_ca: Path

    def install(self, pair: Pair) -> None:
        self.cert.write_bytes(pair.cert)
        self.key.write_bytes(pair.key)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def stranger() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Files:
    cert, key = authority.server().write(tmp_path, "server")
    client_ca = tmp_path / "ca.pem"
    client_ca.write_bytes(authority.cert)
    return Files(Path(cert), Path(key), client_ca)


@pytest.fixture
def run(vllm_config: VllmConfig, files: Files) -> Run:
    def start(*, mutual: bool, **config: Any) -> contextlib.AbstractAsyncContextManager[FakeEngineServer]:
        server = ServerConfig(
            port=0,
            tls_cert=str(files.cert),
            tls_key=str(files.key),
            tls_client_ca=str(files.client_ca) if mutual else None,
            **config,
        )
        return FakeEngineServer.run(vllm_config, server=server)

    return start


@pytest.fixture
async def server(run: Run) -> AsyncIterator[FakeEngineServer]:
    async with run(mutual=False) as running:
        yield running


@pytest.fixture
async def mutual(run: Run) -> AsyncIterator[FakeEngineServer]:
    async with run(mutual=True) as running:
        yield running


def trusting(authority: Authority, client: Pair | None = None) -> grpc.ChannelCredentials:
    if client is None:
        return grpc.ssl_channel_credentials(authority.cert)
    return grpc.ssl_channel_credentials(authority.cert, client.key, client.cert)


async def ask(
    server: FakeEngineServer, credentials: grpc.ChannelCredentials | None, metadata: Any = ()
) -> pb.GetEngineInfoResponse:
    async with server.connect(credentials) as channel:
        return await within(EngineServiceStub(channel).GetEngineInfo(pb.GetEngineInfoRequest(), metadata=metadata))


async def refused(server: FakeEngineServer, credentials: grpc.ChannelCredentials | None) -> bool:
    """Say whether a connection does not come about."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(server, credentials)
    return caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_the_client_over_tls(server: FakeEngineServer, authority: Authority) -> None:
    server.core.answer = [5]
    credentials = grpc.ssl_channel_credentials(authority.cert)
    async with tokenwire.AsyncClient(server.transport.address, credentials=credentials) as client:
        assert list((await client.generate([1, 2, 3])).token_ids) == [5]
        assert [list(delta.token_ids) async for delta in client.stream([1, 2, 3])] == [[5]]


async def test_a_client_that_does_not_know_the_authority(server: FakeEngineServer, stranger: Authority) -> None:
    assert await refused(server, trusting(stranger))
    assert await refused(server, grpc.ssl_channel_credentials())


async def test_plain_text_is_refused(server: FakeEngineServer) -> None:
    assert await refused(server, None)


async def test_a_clients_certificate_is_not_asked_for(
    server: FakeEngineServer, authority: Authority, stranger: Authority
) -> None:
    await ask(server, trusting(authority, stranger.client()))


async def test_an_expired_server_certificate(run: Run, files: Files, authority: Authority) -> None:
    files.install(authority.server(expired=True))
    async with run(mutual=False) as server:
        assert await refused(server, trusting(authority))


async def test_a_client_certificate_is_needed_and_checked(
    mutual: FakeEngineServer, authority: Authority, stranger: Authority
) -> None:
    await ask(mutual, trusting(authority, authority.client()))
    assert await refused(mutual, trusting(authority))
    assert await refused(mutual, trusting(authority, stranger.client()))
    assert await refused(mutual, trusting(authority, authority.client(expired=True)))
    assert await refused(mutual, None)


async def test_health_needs_a_client_certificate_too(mutual: FakeEngineServer, authority: Authority) -> None:
    request = health_pb2.HealthCheckRequest()
    async with mutual.connect(trusting(authority, authority.client())) as channel:
        response = await within(health_pb2_grpc.HealthStub(channel).Check(request))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    async with mutual.connect(trusting(authority)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(health_pb2_grpc.HealthStub(channel).Check(request))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_token_and_a_client_certificate_are_both_needed(run: Run, tmp_path: Path, authority: Authority) -> None:
    token_file = tmp_path / "tokens"
    token_file.write_text(TOKEN)  # nothing else runs meanwhile
    bearer = (("authorization", f"Bearer {TOKEN}"),)
    async with run(mutual=True, token_file=str(token_file)) as server:
        await ask(server, trusting(authority, authority.client()), bearer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(server, trusting(authority), bearer)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        failure = await failure_of(ask(server, trusting(authority, authority.client())))
        assert failure.reason == "UNAUTHENTICATED"


async def test_renewed_files_are_used_from_the_next_connection_on(
    mutual: FakeEngineServer, files: Files, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ours, theirs = authority.client(), stranger.client()
    async with mutual.connect(trusting(authority, ours)) as old:
        stub = EngineServiceStub(old)
        await within(stub.GetEngineInfo(pb.GetEngineInfoRequest()))
        files.install(stranger.server())
        await ask(mutual, trusting(stranger, ours))
        assert await refused(mutual, trusting(authority, ours))
        files.client_ca.write_bytes(stranger.cert)
        await ask(mutual, trusting(stranger, theirs))
        assert await refused(mutual, trusting(stranger, ours))
        # Connections that there are stay.
        await within(stub.GetEngineInfo(pb.GetEngineInfoRequest()))
    assert "reloaded the TLS files" in caplog.text


async def test_broken_new_files_leave_the_old_ones_in_use(
    server: FakeEngineServer, files: Files, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    new = stranger.server()
    # The certificate comes first, and for a moment the key is another's.
    files.cert.write_bytes(new.cert)
    await ask(server, trusting(authority))
    await ask(server, trusting(authority))
    assert caplog.text.count("cannot reload the TLS files") == 1
    assert "is not the key of" in caplog.text
    files.cert.unlink()
    await ask(server, trusting(authority))
    assert "No such file" in caplog.text
    files.install(new)
    await ask(server, trusting(stranger))


def load(files: Files) -> None:
    TlsFiles(str(files.cert), str(files.key), str(files.client_ca)).credentials()


def fault(files: Files) -> str:
    with pytest.raises(AccessError) as caught:
        load(files)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "option"), [("cert", "--tls-cert"), ("key", "--tls-key"), ("client_ca", "--tls-client-ca")]
)
def test_files_that_are_missing_or_hold_something_else(files: Files, field: str, option: str) -> None:
    path: Path = getattr(files, field)
    path.write_text("nonsense")
    assert fault(files).startswith(f"{option} {path}: contains no ")
    path.write_text("")
    assert fault(files).startswith(f"{option} {path}: contains no ")
    path.unlink()
    assert fault(files) == f"{option} {path}: No such file or directory"


def test_a_key_of_another_certificate(files: Files, authority: Authority) -> None:
    files.key.write_bytes(authority.server().key)
    assert fault(files) == f"--tls-key {files.key}: is not the key of the certificate in --tls-cert {files.cert}"


def test_a_key_with_a_passphrase(files: Files) -> None:
    files.key.write_bytes(encrypted(files.key.read_bytes(), b"secret"))
    assert "without a passphrase" in fault(files)


def test_a_key_that_every_user_can_read_is_warned_about(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    load(files)
    assert not caplog.text
    files.key.chmod(0o644)
    load(files)
    assert f"--tls-key {files.key} can be read by every user" in caplog.text
