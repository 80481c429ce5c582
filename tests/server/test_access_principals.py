"""With authentication, requests and their ids belong to whoever sent them."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, failure_of, read, within
from fake_engine.server import generation_input
from harness.certificates import Authority, Pair
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2 import (
    ABORT_OUTCOME_ABORTED,
    ABORT_OUTCOME_ALREADY_FINISHED,
    ABORT_OUTCOME_NOT_FOUND,
    ABORT_OUTCOME_REMEMBERED,
)
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.generation_pb2 import FINISH_REASON_ABORT
from tokenwire.v1.multiplex_pb2 import MultiplexAbort, MultiplexSubmit
from tokenwire_server.config import ServerConfig

TOKENS = {"alice": "alice-token-0123456789", "bob": "bob-token-0123456789ab"}


class Caller(NamedTuple):
    """A caller with a channel of its own and what it sends along."""

    stub: EngineServiceStub
    metadata: tuple[tuple[str, str], ...] = ()

    def generate(self, request_id: str) -> grpc.aio.UnaryUnaryCall[pb.GenerateRequest, pb.GenerateResponse]:
        request = pb.GenerateRequest(input=generation_input([1, 2, 3], None, {"request_id": request_id}))
        return self.stub.Generate(request, metadata=self.metadata)

    def stream(self, request_id: str) -> grpc.aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]:
        request = pb.GenerateStreamRequest(input=generation_input([1, 2, 3], None, {"request_id": request_id}))
        return self.stub.GenerateStream(request, metadata=self.metadata)

    def multiplex(self) -> grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]:
        return self.stub.Multiplex(metadata=self.metadata)

    async def abort(self, *request_ids: str, **fields: Any) -> list[int]:
        request = pb.AbortRequest(request_ids=request_ids, **fields)
        response = await within(self.stub.Abort(request, metadata=self.metadata))
        return [result.outcome for result in response.results]


def submit(handle: int, request_id: str) -> pb.MultiplexRequest:
    message = generation_input([1, 2, 3], None, {"request_id": request_id})
    return pb.MultiplexRequest(submit=MultiplexSubmit(handle=handle, input=message))


class Two(NamedTuple):
    """A server and two principals."""

    server: FakeEngineServer
    alice: Caller
    bob: Caller


@contextlib.asynccontextmanager
async def with_tokens(vllm_config: VllmConfig, folder: Path, **config: Any) -> AsyncIterator[Two]:
    token_file = folder / "tokens"
    token_file.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    settings = ServerConfig(port=0, token_file=str(token_file), **config)
    async with FakeEngineServer.run(vllm_config, server=settings) as server:
        # On one connection: it is not the connection that counts.
        alice, bob = (Caller(server.stub, (("authorization", f"Bearer {token}"),)) for token in TOKENS.values())
        yield Two(server, alice, bob)


@contextlib.asynccontextmanager
async def with_certificates(
    vllm_config: VllmConfig, folder: Path, clients: tuple[Pair, Pair], authority: Authority, **config: Any
) -> AsyncIterator[Two]:
    cert, key = authority.server().write(folder, "server")
    client_ca = folder / "ca.pem"
    client_ca.write_bytes(authority.cert)
    settings = ServerConfig(port=0, tls_cert=cert, tls_key=key, tls_client_ca=str(client_ca), **config)
    async with FakeEngineServer.run(vllm_config, server=settings) as server, contextlib.AsyncExitStack() as stack:
        alice, bob = [
            Caller(
                EngineServiceStub(
                    await stack.enter_async_context(
                        server.connect(grpc.ssl_channel_credentials(authority.cert, client.key, client.cert))
                    )
                )
            )
            for client in clients
        ]
        yield Two(server, alice, bob)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(params=["tokens", "certificates"])
async def two(
    request: pytest.FixtureRequest, vllm_config: VllmConfig, tmp_path: Path, authority: Authority
) -> AsyncIterator[Two]:
    if request.param == "tokens":
        running = with_tokens(vllm_config, tmp_path)
    else:
        clients = authority.client("alice"), authority.client("bob")
        running = with_certificates(vllm_config, tmp_path, clients, authority)
    async with running as found:
        yield found


async def test_nobody_aborts_the_request_of_another(two: Two) -> None:
    call = two.alice.generate("a")
    request = await two.server.core.next_request()
    assert await two.bob.abort("a") == [ABORT_OUTCOME_NOT_FOUND]
    assert request.live
    assert await two.alice.abort("a") == [ABORT_OUTCOME_ABORTED]
    assert await two.server.core.next_abort() == [request.internal_id]
    assert (await within(call)).outputs[0].finish_reason == FINISH_REASON_ABORT
    # Nor learns of it.
    assert await two.bob.abort("a") == [ABORT_OUTCOME_NOT_FOUND]
    assert await two.alice.abort("a") == [ABORT_OUTCOME_ABORTED]
    assert two.server.core.idle


async def test_two_principals_use_one_id_at_the_same_time(two: Two) -> None:
    core = two.server.core
    # While both are on their way into the engine, too.
    core.admission.clear()
    calls = [two.alice.generate("a"), two.bob.generate("a")]
    requests = await core.next_requests(2)
    core.admission.set()
    for request in requests:
        request.step(7, finish="length")
    responses = [await within(call) for call in calls]
    assert [response.request_id for response in responses] == ["a", "a"]
    assert [list(response.outputs[0].token_ids) for response in responses] == [[7], [7]]
    engine_ids = {request.request.external_req_id for request in requests}
    assert engine_ids == {"alice a", "bob a"}
    assert core.idle


async def test_outputs_go_to_whoever_asked(two: Two) -> None:
    core = two.server.core
    calls = []
    for caller, token in ((two.alice, 5), (two.bob, 6)):
        calls.append(caller.stream("a"))
        (await core.next_request()).step(token)
    assert [list((await read(call)).outputs[0].token_ids) for call in calls] == [[5], [6]]
    calls[0].cancel()
    [gone] = await core.next_abort()
    assert gone.startswith("alice a")
    assert await two.bob.abort("a") == [ABORT_OUTCOME_ABORTED]


async def test_ones_own_live_id_is_refused_from_every_connection(two: Two) -> None:
    call = two.alice.generate("a")
    request = await two.server.core.next_request()
    assert (await failure_of(two.alice.generate("a"))).reason == "DUPLICATE_REQUEST_ID"
    request.step(5, finish="length")
    await within(call)
    assert await two.alice.abort("a") == [ABORT_OUTCOME_ALREADY_FINISHED]


async def test_an_id_that_one_asks_to_remember_is_free_for_another(two: Two) -> None:
    two.server.core.answer = [5]
    assert await two.bob.abort("a", remember_unknown_for=Duration(seconds=60)) == [ABORT_OUTCOME_REMEMBERED]
    assert list((await within(two.alice.generate("a"))).outputs[0].token_ids) == [5]
    assert (await within(two.bob.generate("a"))).outputs[0].finish_reason == FINISH_REASON_ABORT


async def test_multiplex_streams_of_two_principals(two: Two) -> None:
    core = two.server.core
    streams = [two.alice.multiplex(), two.bob.multiplex()]
    requests = []
    for stream in streams:
        await stream.write(submit(1, "a"))
        requests.append(await core.next_request())
        message = await read(stream)
        assert [(one.handle, one.request_id) for one in message.step.accepted] == [(1, "a")]
    assert await two.bob.abort("a") == [ABORT_OUTCOME_ABORTED]
    assert (await read(streams[1])).step.finished[0].finish_reason == FINISH_REASON_ABORT
    assert requests[0].live
    await streams[0].write(pb.MultiplexRequest(abort=MultiplexAbort(handles=[1])))
    assert (await read(streams[0])).step.finished[0].finish_reason == FINISH_REASON_ABORT
    # Leaving a stream lets go of what is its own.
    await streams[0].write(submit(2, "b"))
    await read(streams[0])
    call = two.bob.generate("b")
    await core.next_requests(2)
    streams[0].cancel()
    for _ in range(3):
        aborted = await core.next_abort()
    assert len(aborted) == 1
    assert aborted[0].startswith("alice b")
    call.cancel()
    streams[1].cancel()
    await core.next_abort()


async def test_the_first_alternative_name_goes_before_the_common_name(
    vllm_config: VllmConfig, tmp_path: Path, authority: Authority
) -> None:
    clients = authority.client("same", dns=["router.example", "other"]), authority.client("two words, ü")
    async with with_certificates(vllm_config, tmp_path, clients, authority) as two:
        ids = []
        for caller in (two.alice, two.bob):
            call = caller.generate("a")
            request = await two.server.core.next_request()
            ids.append(request.request.external_req_id)
            request.step(5, finish="length")
            await within(call)
        assert ids == ["router.example a", "two%20words%2C%20%C3%BC a"]


async def test_a_certificate_that_names_nobody(vllm_config: VllmConfig, tmp_path: Path, authority: Authority) -> None:
    clients = authority.client(None), authority.client("bob")
    async with with_certificates(vllm_config, tmp_path, clients, authority) as two:
        stream = two.alice.multiplex()
        for call in (two.alice.generate("a"), two.alice.stream("a").read(), two.alice.abort("a"), stream.read()):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert two.server.core.idle


async def test_live_requests_of_a_principal_are_limited(vllm_config: VllmConfig, tmp_path: Path) -> None:
    async with with_tokens(vllm_config, tmp_path, max_requests_per_client=2) as two:
        core = two.server.core
        stream = two.alice.multiplex()
        await stream.write(submit(1, "a"))
        first = await core.next_request()
        await read(stream)
        call = two.alice.generate("b")
        second = await core.next_request()
        for refused in (two.alice.generate("c"), two.alice.stream("c").read()):
            failure = await failure_of(refused)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL")
            assert failure.retry_delay is not None
        await stream.write(submit(2, "c"))
        [rejection] = (await read(stream)).step.rejected
        assert (rejection.handle, rejection.status.reason) == (2, "QUEUE_FULL")
        # Another principal does not notice, and the end of a request makes room.
        core.answer = [5]
        await within(two.bob.generate("a"))
        second.step(5, finish="length")
        await within(call)
        await within(two.alice.generate("c"))
        first.step(5, finish="length")
        await read(stream)
        stream.cancel()
        assert not two.server.registry._per_client


async def test_without_authentication_the_machine_is_limited(vllm_config: VllmConfig) -> None:
    settings = ServerConfig(port=0, max_requests_per_client=1)
    async with FakeEngineServer.run(vllm_config, server=settings) as server, server.connect() as another:
        call = server.generate(request_id="a")
        request = await server.core.next_request()
        failure = await failure_of(Caller(EngineServiceStub(another)).generate("b"))
        assert failure.reason == "QUEUE_FULL"
        assert "ipv4:127.0.0.1 " in failure.message
        # Without authentication ids belong to all.
        assert await Caller(EngineServiceStub(another)).abort("a") == [ABORT_OUTCOME_ABORTED]
        await server.core.next_abort()
        await within(call)
        assert not request.live
