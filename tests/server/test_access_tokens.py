"""Bearer tokens: who gets in, and how the file follows its changes."""

import asyncio
import contextlib
import hmac
import logging
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from vllm.config import VllmConfig

import tokenwire
from fake_engine import FakeEngineServer, failure_of, read, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire.v1.multiplex_pb2 import MultiplexSubmit
from tokenwire_server.access import files, tokens
from tokenwire_server.access.files import AccessError
from tokenwire_server.access.tokens import TokenFile
from tokenwire_server.config import ServerConfig

ALICE, BOB, NAMELESS = "alice-token-0123456789", "bob-token-0123456789ab", "0123456789abcdef~+/=="
INPUT = GenerationInput(prompt_token_ids=[1, 2, 3])

Run = Callable[..., contextlib.AbstractAsyncContextManager[FakeEngineServer]]


def write_token_file(folder: Path) -> Path:
    path = folder / "tokens"
    path.write_text(f"# who may call\nalice {ALICE}\n\n  bob\t{BOB}  \n{NAMELESS}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_token_file(tmp_path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(vllm_config: VllmConfig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEngineServer]:
    """The server of all cells that change nothing about it."""
    config = ServerConfig(port=0, token_file=str(write_token_file(tmp_path_factory.mktemp("tokens"))))
    async with FakeEngineServer.run(vllm_config, server=config) as running:
        yield running


@pytest.fixture
def run(vllm_config: VllmConfig, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(tokens, "_INTERVAL", 0.01)

    def start(**config: Any) -> contextlib.AbstractAsyncContextManager[FakeEngineServer]:
        return FakeEngineServer.run(vllm_config, server=ServerConfig(port=0, token_file=str(token_file), **config))

    return start


@pytest.fixture
async def server(run: Run) -> AsyncIterator[FakeEngineServer]:
    async with run() as running:
        yield running


def write(path: Path, content: str) -> None:
    path.write_text(content)


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    while text not in caplog.text:  # noqa: ASYNC110  # a log has no event
        await asyncio.sleep(0.01)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def unary(stub: EngineServiceStub, metadata: Any) -> Message:
    return await stub.Generate(pb.GenerateRequest(input=INPUT), metadata=metadata)


async def stream(stub: EngineServiceStub, metadata: Any) -> Message:
    return await read(stub.GenerateStream(pb.GenerateStreamRequest(input=INPUT), metadata=metadata))


async def multiplex(stub: EngineServiceStub, metadata: Any) -> Message:
    # Refused without a message of the caller's.
    return await read(stub.Multiplex(metadata=metadata))


async def abort(stub: EngineServiceStub, metadata: Any) -> Message:
    return await stub.Abort(pb.AbortRequest(request_ids=["a"]), metadata=metadata)


async def info(stub: EngineServiceStub, metadata: Any) -> Message:
    return await stub.GetEngineInfo(pb.GetEngineInfoRequest(), metadata=metadata)


each_method = pytest.mark.parametrize("method", [unary, stream, multiplex, abort, info])


@each_method
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong-token-0123456789"),
        bearer(ALICE[:-1]),
        bearer(ALICE + "x"),
        bearer(ALICE.upper()),
        bearer(""),
        bearer(f"alice {ALICE}"),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("authorization", ""),),
        bearer(ALICE) + bearer(BOB),
    ],
    ids=str,
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_without_a_right_token_is_refused(guarded: FakeEngineServer, method: Any, metadata: Any) -> None:
    failure = await failure_of(method(guarded.stub, metadata))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert failure.domain == "tokenwire.v1"
    assert ALICE not in failure.message
    assert guarded.core.idle


@pytest.mark.parametrize("token", [ALICE, BOB, NAMELESS])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_each_token_lets_in(server: FakeEngineServer, token: str, scheme: str) -> None:
    server.core.answer = [5]
    metadata = (("authorization", f"{scheme} {token}"),)
    for method in (unary, stream, abort, info):
        await within(method(server.stub, metadata))
    call = server.stub.Multiplex(metadata=metadata)
    await call.write(pb.MultiplexRequest(submit=MultiplexSubmit(handle=1, input=INPUT)))
    message = await read(call)
    assert message.step.accepted[0].handle == 1
    call.cancel()


async def test_the_client_sends_its_token(server: FakeEngineServer) -> None:
    server.core.answer = [5]
    async with tokenwire.AsyncClient(server.transport.address, token=ALICE) as client:
        assert list((await client.generate([1, 2, 3])).token_ids) == [5]
    async with tokenwire.AsyncClient(server.transport.address, token=BOB[:-1]) as client:
        with pytest.raises(tokenwire.UnauthenticatedError):
            await client.generate([1, 2, 3])


async def test_a_refused_request_is_not_even_read(server: FakeEngineServer) -> None:
    large = GenerationInput(prompt_token_ids=[1] * 10_000_000)
    failure = await failure_of(server.stub.Generate(pb.GenerateRequest(input=large)))
    assert failure.reason == "UNAUTHENTICATED"
    broken: Any = server.channel.unary_unary("/tokenwire.v1.EngineService/Generate")
    assert (await failure_of(broken(b"\xff\xff"))).reason == "UNAUTHENTICATED"


async def test_an_unknown_method_tells_a_stranger_nothing(server: FakeEngineServer) -> None:
    call: Any = server.channel.unary_unary("/tokenwire.v1.EngineService/Nothing")
    assert (await failure_of(call(b""))).reason == "UNAUTHENTICATED"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", metadata=bearer(ALICE))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def check_health(server: FakeEngineServer, metadata: Any = ()) -> None:
    stub = health_pb2_grpc.HealthStub(server.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
    assert response.status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def check_reflection(server: FakeEngineServer, metadata: Any = ()) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(server.channel).ServerReflectionInfo(metadata=metadata)
    await call.write(request)
    assert (await read(call)).list_services_response.service
    v1 = server.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )(metadata=metadata)
    await v1.write(request)
    assert (await read(v1)).list_services_response.service
    call.cancel()
    v1.cancel()


@pytest.mark.parametrize(
    ("config", "health_open", "reflection_open"),
    [
        ({}, True, False),
        ({"open_services": ()}, False, False),
        ({"open_services": ("reflection",)}, False, True),
        ({"open_services": ("health", "reflection")}, True, True),
    ],
)
async def test_health_and_reflection_are_open_or_closed(
    run: Run, config: Any, health_open: bool, reflection_open: bool
) -> None:
    async with run(**config) as server:
        for check, is_open in ((check_health, health_open), (check_reflection, reflection_open)):
            await within(check(server, bearer(ALICE)))
            if is_open:
                await within(check(server))
            else:
                assert (await failure_of(check(server))).reason == "UNAUTHENTICATED"
        assert (await failure_of(info(server.stub, ()))).reason == "UNAUTHENTICATED"


async def until_let_in(server: FakeEngineServer, token: str, *, expected: bool = True) -> None:
    async def wait() -> None:
        while True:
            try:
                await info(server.stub, bearer(token))
                let_in = True
            except grpc.aio.AioRpcError:
                let_in = False
            if let_in is expected:
                return
            await asyncio.sleep(0.01)

    await within(wait())


async def test_a_new_token_is_picked_up_and_a_revoked_one_refused(server: FakeEngineServer, token_file: Path) -> None:
    # By writing to the file.
    write(token_file, f"alice {ALICE}\ncarol carol-token-0123456789\n")
    await until_let_in(server, "carol-token-0123456789")
    assert (await failure_of(info(server.stub, bearer(BOB)))).reason == "UNAUTHENTICATED"
    await info(server.stub, bearer(ALICE))
    # By another file in its place.
    new = token_file.with_name("new")
    write(new, f"bob {BOB}\n")
    await asyncio.to_thread(new.replace, token_file)
    await until_let_in(server, BOB)
    assert (await failure_of(info(server.stub, bearer(ALICE)))).reason == "UNAUTHENTICATED"


async def test_a_copy_that_kept_its_time_is_picked_up(server: FakeEngineServer, token_file: Path) -> None:
    """`cp -p` and `rsync` make them. A new mode or owner, which may make a file readable at last, tells as little."""
    before = await asyncio.to_thread(token_file.stat)
    content = await asyncio.to_thread(token_file.read_text)
    write(token_file, content.replace(BOB, BOB[::-1]))
    os.utime(token_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    await until_let_in(server, BOB[::-1])
    assert (await failure_of(info(server.stub, bearer(BOB)))).reason == "UNAUTHENTICATED"


async def test_a_file_that_goes_while_it_is_read_does_not_end_the_watch(
    server: FakeEngineServer, token_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def read_and_remove(option: str, path: Path) -> bytes:
        content = files.read(option, path)
        path.unlink()
        return content

    monkeypatch.setattr(tokens, "read", read_and_remove)
    write(token_file, "carol carol-token-0123456789\n")
    await within(logged(caplog, "No such file"))
    monkeypatch.setattr(tokens, "read", files.read)
    write(token_file, f"bob {BOB}\n")
    await until_let_in(server, BOB)


async def test_a_multiplex_stream_of_a_revoked_token_takes_nothing_new(
    server: FakeEngineServer, token_file: Path
) -> None:
    call = server.stub.Multiplex(metadata=bearer(BOB))
    await call.write(pb.MultiplexRequest(submit=MultiplexSubmit(handle=1, input=INPUT)))
    await read(call)
    request = await server.core.next_request()
    write(token_file, f"alice {ALICE}\n")
    await until_let_in(server, BOB, expected=False)
    await call.write(pb.MultiplexRequest(submit=MultiplexSubmit(handle=2, input=INPUT)))
    message = await read(call)
    [rejection] = message.step.rejected
    assert (rejection.handle, rejection.status.reason) == (2, "UNAUTHENTICATED")
    # What runs goes on.
    request.step(5, finish="length")
    message = await read(call)
    assert message.step.finished[0].handle == 1
    call.cancel()


async def test_a_broken_file_leaves_the_tokens_as_they_were(
    server: FakeEngineServer, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(token_file, f"bob {BOB} {ALICE}\n")
    await within(logged(caplog, "line 1"))
    await info(server.stub, bearer(ALICE))
    write(token_file, "")
    await within(logged(caplog, "contains no token"))
    await info(server.stub, bearer(ALICE))
    await asyncio.to_thread(token_file.unlink)
    await within(logged(caplog, "No such file"))
    await info(server.stub, bearer(ALICE))
    assert caplog.text.count("cannot reload the tokens") == 3
    write(token_file, f"bob {BOB}\n")
    await until_let_in(server, ALICE, expected=False)
    assert "read" in caplog.text


async def test_no_token_and_no_prompt_is_in_the_log(
    server: FakeEngineServer,
    token_file: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """FIELD_LOG S8."""
    caplog.set_level(logging.DEBUG)
    wrong = "wrong-token-0123456789"
    prompt = [111, 222, 333]
    request = pb.GenerateRequest(input=GenerationInput(prompt_token_ids=prompt))
    await failure_of(server.stub.Generate(request, metadata=bearer(wrong)))
    server.core.refusal = RuntimeError("a bug")
    await failure_of(server.stub.Generate(request, metadata=bearer(ALICE)))
    server.core.refusal = None
    call = server.stub.Generate(request, metadata=bearer(ALICE))
    (await server.core.next_request()).step(5, finish="error")
    await failure_of(call)
    write(token_file, f"alice {ALICE} {BOB}\n")
    await within(logged(caplog, "cannot reload the tokens"))
    assert "failed unexpectedly" in caplog.text
    text = caplog.text + "".join(capfd.readouterr())
    for secret in (ALICE, BOB, wrong):
        assert secret not in text
    # A single id may stand for something else, in the path of a folder for example.
    assert not re.search(r"111\W+222|222\W+333", text)


def test_a_token_is_compared_with_all_and_in_constant_time(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return original(a, b)

    original = hmac.compare_digest
    monkeypatch.setattr(tokens.hmac, "compare_digest", compare)  # type: ignore[attr-defined]  # an import of the module's
    file = TokenFile(str(token_file))
    file.load()
    for token in (ALICE, NAMELESS, "wrong", ""):
        compared.clear()
        _ = file.grant(token)
        assert compared == [(32, 32)] * 3


def test_tokens_of_one_name_are_one_principal_and_nameless_ones_are_their_own(token_file: Path) -> None:
    other = "other-token-0123456789"
    token_file.write_text(f"alice {ALICE}\nalice {BOB}\n{NAMELESS}\n{other}\n")
    file = TokenFile(str(token_file))
    file.load()
    principals = [grant.principal for token in (ALICE, BOB, NAMELESS, other) if (grant := file.grant(token))]
    assert principals[:2] == ["alice", "alice"]
    assert len(set(principals)) == 3
    assert not any(token in principal for token in (NAMELESS, other) for principal in principals)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "contains no token"),
        (b"# nobody\n", "contains no token"),
        (b"short\n", "line 1: a token must be 16"),
        (f"alice:{ALICE}\n".encode(), "line 1: a token must be 16"),
        (f"\nalice {ALICE} # comment\n".encode(), "line 2: expected a name and a token"),
        (f"al/ice {ALICE}\n".encode(), "line 1: a name must be"),
        (f"{ALICE}\nalice {ALICE}\n".encode(), "line 2: the token is already in the file"),
        ("alice token-with-ümlauts".encode(), "line 1: a token must be 16"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_file_that_is_wrong(token_file: Path, content: bytes, fault: str) -> None:
    token_file.write_bytes(content)
    with pytest.raises(AccessError) as caught:
        TokenFile(str(token_file)).load()
    assert fault in str(caught.value)
    assert str(token_file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ALICE not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"--token-file .*: No such file"):
        TokenFile(str(tmp_path / "none")).load()
    with pytest.raises(AccessError, match=r"--token-file .*: Is a directory"):
        TokenFile(str(tmp_path)).load()


def test_a_file_that_every_user_can_read_is_warned_about(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    TokenFile(str(token_file)).load()
    assert not caplog.text
    token_file.chmod(0o644)
    TokenFile(str(token_file)).load()
    assert "can be read by every user" in caplog.text
