"""docs/grpcurl.md where it needs a server of a special kind, and its table of reasons; tests/languages runs the rest."""

import asyncio
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer
from harness.certificates import Authority
from harness.pages import (
    ADDRESS,
    GRPCURL_ON_A_SPECIAL_SERVER,
    GRPCURL_PAGE,
    ROOT,
    Block,
    bash_blocks,
    check_block,
)
from tokenwire._contract import Reason
from tokenwire_server.config import ServerConfig
from tokenwire_server.errors import RequestError

LOADING, TOKEN, MUTUAL, UDS = GRPCURL_ON_A_SPECIAL_SERVER
SOCKET = "/run/tokenwire/engine.sock"


def blocks(heading: str) -> list[Block]:
    found = [block for block in bash_blocks(GRPCURL_PAGE) if block.heading == heading]
    assert found, f"the page has no commands under {heading!r}"
    return found


async def check(heading: str, folder: Path, replace: dict[str, str]) -> None:
    for block in blocks(heading):
        await asyncio.to_thread(check_block, block, folder, replace)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands are typed: a clone's root, as far as they need it, with the files of a caller."""
    authority = Authority()
    authority.server().write(tmp_path, "server")
    authority.client().write(tmp_path, "client")
    (tmp_path / "ca.pem").write_bytes(authority.cert)
    (tmp_path / "tokens").write_text("alice alice-token-0123456789\n")
    (tmp_path / "tokens").chmod(0o600)
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    return tmp_path


@pytest.fixture
def socket() -> Iterator[str]:
    # Socket paths are short; pytest's own folders may not be.
    with tempfile.TemporaryDirectory(prefix="tokenwire-") as folder:
        yield f"{folder}/socket"


async def test_an_engine_that_does_not_serve(vllm_config: VllmConfig, folder: Path) -> None:
    async with FakeEngineServer.run(vllm_config, ready=False) as server:
        await check(LOADING, folder, {ADDRESS: server.transport.address})


async def test_tls_and_a_token(vllm_config: VllmConfig, folder: Path) -> None:
    config = ServerConfig(
        port=0,
        tls_cert=str(folder / "server.pem"),
        tls_key=str(folder / "server.key"),
        token_file=str(folder / "tokens"),
    )
    async with FakeEngineServer.run(vllm_config, server=config) as server:
        await check(TOKEN, folder, {ADDRESS: server.transport.address})


async def test_a_client_certificate(vllm_config: VllmConfig, folder: Path) -> None:
    config = ServerConfig(
        port=0,
        tls_cert=str(folder / "server.pem"),
        tls_key=str(folder / "server.key"),
        tls_client_ca=str(folder / "ca.pem"),
    )
    async with FakeEngineServer.run(vllm_config, server=config) as server:
        await check(MUTUAL, folder, {ADDRESS: server.transport.address})


async def test_a_unix_socket(vllm_config: VllmConfig, folder: Path, socket: str) -> None:
    async with FakeEngineServer.run(vllm_config, server=ServerConfig(uds=socket)):
        await check(UDS, folder, {SOCKET: socket})


def test_the_table_has_every_reason_and_its_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", GRPCURL_PAGE.read_text(), re.MULTILINE)
    told = {reason: int(code) for code, reason in rows}
    # These two come within a stream, which does not end.
    statuses = {reason for reason in Reason if reason not in {Reason.HANDLE_IN_USE, Reason.UNKNOWN_HANDLE}}
    assert told == {reason.value: 64 + RequestError(reason, "").code.value[0] for reason in statuses}
