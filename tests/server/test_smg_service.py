"""`vllm.grpc.engine.VllmEngine` beside our service: its requests are requests like ours."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from vllm.config import VllmConfig
from vllm.v1.metrics.stats import PrefillStats

from fake_engine import FakeEngineServer, collect, failure_of, make_config, read, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire_server.config import ServerConfig
from tokenwire_server.process.arguments import parse
from tokenwire_server.requests.server_state import State

SERVICE = "vllm.grpc.engine.VllmEngine"
SMG = ServerConfig(port=0, smg=True)

each_form = pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])


@pytest.fixture(params=[True, False], ids=["direct", "ordinary"])
async def server(request: pytest.FixtureRequest, vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(vllm_config, server=SMG, direct_path=request.param) as running:
        yield running


@pytest.fixture
def stub(server: FakeEngineServer) -> Any:
    return VllmEngineStub(server.channel)


def generate_request(sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    return smg.GenerateRequest(**{"tokenized": {"input_ids": [1, 2, 3]}, "sampling_params": sampling, **fields})


def generate(stub: Any, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    return stub.Generate(generate_request(sampling, **fields))


async def test_a_request_in_one_answer(server: FakeEngineServer, stub: Any) -> None:
    call = generate(stub, {"temperature": 0.5, "max_tokens": 8, "stop_token_ids": [9]}, request_id="a")
    answer = asyncio.ensure_future(collect(call))
    request = await server.core.next_request()
    assert request.request.prompt_token_ids == [1, 2, 3]
    assert (request.params.temperature, request.params.max_tokens) == (0.5, 8)
    request.step(5, prefill_stats=PrefillStats(num_prompt_tokens=3, num_cached_tokens=2, num_computed_tokens=1))
    request.step(6, 9, finish="stop", stop=9)
    [message] = await within(answer)
    assert message.complete == smg.GenerateComplete(
        output_ids=[5, 6, 9],
        finish_reason="stop",
        prompt_tokens=3,
        completion_tokens=3,
        cached_tokens=2,
        matched_token_id=9,
    )


async def test_a_stream(server: FakeEngineServer, stub: Any) -> None:
    call = generate(stub, stream=True)
    first = asyncio.ensure_future(read(call))
    request = await server.core.next_request()
    request.step(5)
    assert (await within(first)).chunk == smg.GenerateStreamChunk(token_ids=[5], prompt_tokens=3, completion_tokens=1)
    request.step(6, finish="length")
    assert [message.WhichOneof("response") for message in await collect(call)] == ["chunk", "complete"]


async def test_the_models_defaults_are_for_the_coordinator_to_apply(tmp_path: Path) -> None:
    make_config(tmp_path)
    defaults = {"temperature": 0.3, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.1, "max_new_tokens": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    async with FakeEngineServer.run(make_config(tmp_path), server=SMG) as server:
        stub = VllmEngineStub(server.channel)
        info = await within(stub.GetModelInfo(smg.GetModelInfoRequest()))
        assert json.loads(info.default_sampling_params_json) == {
            name: value for name, value in defaults.items() if name != "max_new_tokens"
        }
        answer = asyncio.ensure_future(collect(generate(stub)))
        request = await server.core.next_request()
        params = request.params
        assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (1.0, 0, 1.0, 1.0)
        # There is no other way to say how much is enough.
        assert params.max_tokens == 7
        request.step(5, finish="length")
        await within(answer)


@each_form
async def test_several_sequences(server: FakeEngineServer, stub: Any, stream: bool) -> None:
    answer = asyncio.ensure_future(collect(generate(stub, {"n": 2, "seed": 7}, stream=stream)))
    first, second = await server.core.next_requests(2)
    first.step(5, finish="stop")
    second.step(6)
    second.step(7, finish="length")
    messages = await within(answer)
    completes = {m.complete.index: m.complete for m in messages if m.HasField("complete")}
    assert sorted(completes) == [0, 1]
    assert [completes[i].finish_reason for i in (0, 1)] == ["stop", "length"]
    assert [completes[i].completion_tokens for i in (0, 1)] == [1, 2]
    ids = {0: list(completes[0].output_ids), 1: list(completes[1].output_ids)}
    for message in messages:
        if message.HasField("chunk"):
            ids[message.chunk.index] += message.chunk.token_ids
    assert ids == {0: [5], 1: [6, 7]}


@each_form
@pytest.mark.parametrize("n", [1, 2])
async def test_an_abort_ends_the_call_with_the_tokens_so_far(
    server: FakeEngineServer, stub: Any, stream: bool, n: int
) -> None:
    """The gateway sends one when its caller goes away, and then reads the stream to its end."""
    call = generate(stub, {"n": n}, request_id="a", stream=stream)
    answer = asyncio.ensure_future(collect(call))
    requests = await server.core.next_requests(n)
    requests[0].step(5)
    assert await within(stub.Abort(smg.AbortRequest(request_ids=["a", "unknown"]))) == smg.AbortResponse()
    assert not any(request.live for request in requests)
    messages = await within(answer)
    completes = [message.complete for message in messages if message.HasField("complete")]
    assert sorted(complete.index for complete in completes) == list(range(n))
    assert {complete.finish_reason for complete in completes} == {"abort"}
    assert sum(complete.completion_tokens for complete in completes) <= 1
    # Our own service knows of it.
    assert await server.abort("a") == [pb.ABORT_OUTCOME_ABORTED]


async def test_our_own_abort_ends_a_request_too(server: FakeEngineServer, stub: Any) -> None:
    answer = asyncio.ensure_future(collect(generate(stub, request_id="a")))
    await server.core.next_request()
    assert await server.abort("a") == [pb.ABORT_OUTCOME_ABORTED]
    [message] = await within(answer)
    assert message.complete.finish_reason == "abort"


async def test_an_abort_without_ids(stub: Any) -> None:
    failure = await failure_of(stub.Abort(smg.AbortRequest()))
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("request_ids",))


@each_form
async def test_a_cancelled_call_frees_the_engine(server: FakeEngineServer, stub: Any, stream: bool) -> None:
    call = generate(stub, stream=stream)
    answer = asyncio.ensure_future(call.read())
    request = await server.core.next_request()
    call.cancel()
    assert await server.core.next_abort() == [request.internal_id]
    await within(asyncio.gather(answer, return_exceptions=True))
    await within(server.registry.idle())


INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("sent", "code", "field"),
    [
        (generate_request({"top_p": 1.5}), INVALID, "sampling_params.top_p"),
        (generate_request({"n": 2, "temperature": 0.0}), INVALID, "sampling_params.n"),
        (generate_request({"max_tokens": 0}), INVALID, "sampling_params.max_tokens"),
        (generate_request({"stop": ["a", ""]}), INVALID, "sampling_params.stop[1]"),
        (generate_request({"regex": "a"}), grpc.StatusCode.FAILED_PRECONDITION, "sampling_params.constraint"),
        (generate_request(tokenized={}), INVALID, "tokenized.input_ids"),
        (generate_request(tokenized={"input_ids": [1, 1000]}), INVALID, "tokenized.input_ids[1]"),
        (generate_request(request_id="a b"), INVALID, "request_id"),
        (generate_request(data_parallel_rank=1), INVALID, "data_parallel_rank"),
        (generate_request(kv_transfer_params_json="["), UNIMPLEMENTED, "kv_transfer_params_json"),
        (generate_request(tokenized=None, text="hello"), UNIMPLEMENTED, "text"),
        (generate_request(mm_inputs={}), UNIMPLEMENTED, "mm_inputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refusal(server: FakeEngineServer, stub: Any, sent: Any, code: grpc.StatusCode, field: str) -> None:
    failure = await failure_of(stub.Generate(sent).read())
    assert (failure.code, failure.fields) == (code, (field,))
    assert failure.message.startswith(f"{field}: ")
    assert server.core.idle
    assert len(server.registry) == 0


async def test_stop_strings_need_a_tokenizer(server: FakeEngineServer, stub: Any) -> None:
    failure = await failure_of(generate(stub, {"stop": ["a"]}).read())
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_REQUIRED")
    failure = await failure_of(stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read())
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_REQUIRED")
    assert server.core.idle


async def test_ids_are_shared_with_our_own_service(server: FakeEngineServer, stub: Any) -> None:
    ours = server.generate(request_id="a")
    request = await server.core.next_request()
    failure = await failure_of(generate(stub, request_id="a").read())
    assert (failure.reason, failure.fields) == ("DUPLICATE_REQUEST_ID", ("request_id",))
    request.step(5, finish="length")
    await within(ours)


async def test_trace_headers_of_the_metadata(server: FakeEngineServer, stub: Any) -> None:
    # As in test_trace_headers.py.
    server.engine._llm.observability_config = SimpleNamespace(otlp_traces_endpoint="somewhere")
    call = stub.Generate(generate_request(), metadata=(("traceparent", "00-a-b-01"),))
    answer = asyncio.ensure_future(collect(call))
    request = await server.core.next_request()
    assert request.request.trace_headers == {"traceparent": "00-a-b-01"}
    request.step(5, finish="length")
    await within(answer)


async def test_what_was_prefilled_elsewhere_is_released_by_a_refusal(tmp_path: Path) -> None:
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config = make_config(tmp_path, kv_transfer_config=connector)
    remote = json.dumps({"do_remote_prefill": True, "remote_engine_id": "e"})
    async with FakeEngineServer.run(config, server=SMG) as server:
        stub = VllmEngineStub(server.channel)
        refused: list[dict[str, Any]] = [{"truncate_prompt_tokens": 1}, {"top_p": 2.0}, {"stop": ["a"]}]
        for number, sampling in enumerate(refused, 1):
            await failure_of(generate(stub, sampling, kv_transfer_params_json=remote).read())
            async with asyncio.timeout(10):
                while len(server.core.released) < number:  # noqa: ASYNC110  # the engine process is played
                    await asyncio.sleep(0.01)


async def test_a_caller_that_does_not_read_is_ended(vllm_config: VllmConfig) -> None:
    settings = ServerConfig(port=0, smg=True, slow_reader_timeout=0.1)
    async with FakeEngineServer.run(vllm_config, server=settings) as server:
        watching = asyncio.create_task(server.host.slow_readers.run())
        call = generate(VllmEngineStub(server.channel), stream=True)
        first = asyncio.ensure_future(read(call))
        request = await server.core.next_request()
        request.step(5)
        await within(first)
        # More than a connection takes without being read.
        for _ in range(20):
            request.step(*[5] * 1_000_000)
            await asyncio.sleep(0.01)
        assert await server.core.next_abort() == [request.internal_id]
        failure = await failure_of(_drained(call))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
        watching.cancel()


async def _drained(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_principals_do_not_touch_each_others_requests(vllm_config: VllmConfig, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alices-secret-token\nbob bobs-secret-token-too\n")
    settings = ServerConfig(port=0, smg=True, token_file=str(tokens))
    alice, bob = [(("authorization", f"Bearer {token}"),) for token in ("alices-secret-token", "bobs-secret-token-too")]
    async with FakeEngineServer.run(vllm_config, server=settings) as server:
        stub = VllmEngineStub(server.channel)
        for call in (stub.HealthCheck(smg.HealthCheckRequest()), generate(stub).read()):
            assert (await failure_of(call)).code == grpc.StatusCode.UNAUTHENTICATED
        answer = asyncio.ensure_future(collect(stub.Generate(generate_request(request_id="a"), metadata=alice)))
        request = await server.core.next_request()
        await within(stub.Abort(smg.AbortRequest(request_ids=["a"]), metadata=bob))
        assert request.live
        await within(stub.Abort(smg.AbortRequest(request_ids=["a"]), metadata=alice))
        [message] = await within(answer)
        assert message.complete.finish_reason == "abort"


async def test_a_dead_engine(server: FakeEngineServer, stub: Any) -> None:
    answer = asyncio.ensure_future(failure_of(generate(stub, stream=True).read()))
    await server.core.next_request()
    server.core.die()
    failure = await within(answer)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
    health = await within(stub.HealthCheck(smg.HealthCheckRequest()))
    assert not health.healthy
    assert "died" in health.message


async def test_health_while_loading_serving_and_draining(vllm_config: VllmConfig) -> None:
    async with FakeEngineServer.run(vllm_config, server=SMG, ready=False) as server:
        stub = VllmEngineStub(server.channel)
        health = health_pb2_grpc.HealthStub(server.channel)

        async def state() -> tuple[bool, int]:
            own = await within(stub.HealthCheck(smg.HealthCheckRequest()))
            standard = await within(health.Check(health_pb2.HealthCheckRequest(service=SERVICE)))
            return own.healthy, standard.status

        assert await state() == (False, health_pb2.HealthCheckResponse.NOT_SERVING)
        for call in (
            generate(stub).read(),
            generate(stub, {"stop": ["a"]}).read(),
            stub.GetModelInfo(smg.GetModelInfoRequest()),
            stub.GetServerInfo(smg.GetServerInfoRequest()),
            stub.GetLoads(smg.GetLoadsRequest()),
        ):
            assert (await failure_of(call)).reason == "ENGINE_LOADING"
        server.serve()
        await server.transport.set_serving(True)
        assert await state() == (True, health_pb2.HealthCheckResponse.SERVING)
        server.state.enter(State.DRAINING)
        await server.transport.set_serving(False)
        assert await state() == (False, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await failure_of(generate(stub).read())).reason == "DRAINING"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Embed", smg.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
async def test_a_method_that_is_not_served(stub: Any, method: str, message: Any) -> None:
    call = getattr(stub, method)(message)
    failure = await failure_of(call.read() if hasattr(call, "read") else call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_METHOD")
    assert failure.message.startswith(f"{method} is not served: ")


async def test_reflection_lists_the_service(server: FakeEngineServer) -> None:
    call = server.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await within(call.write(reflection_pb2.ServerReflectionRequest(list_services="")))
    services = (await read(call)).list_services_response.service
    assert SERVICE in {service.name for service in services}
    await within(call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)))
    assert len((await read(call)).file_descriptor_response.file_descriptor_proto) == 2
    await call.done_writing()
    assert await within(call.read()) is grpc.aio.EOF


async def test_it_is_served_only_where_it_is_asked_for(vllm_config: VllmConfig) -> None:
    async with FakeEngineServer.run(vllm_config) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(VllmEngineStub(server.channel).HealthCheck(smg.HealthCheckRequest()))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_option() -> None:
    assert parse(["some/model", "--smg"]).server.smg
    assert not parse(["some/model"]).server.smg


@pytest.mark.parametrize("package", ["smg_grpc_proto.generated.vllm_engine_pb2_grpc", "tokenwire.text"])
def test_the_option_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as caught:
        parse(["some/model", "--smg"])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenwire serve: error: --smg requires the extra smg: pip install 'tokenwire[smg]' (")
    assert package in line
