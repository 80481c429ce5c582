"""The status table: what a caller finds out, whatever goes wrong."""

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import grpc
import pytest
from vllm.config import VllmConfig
from vllm.exceptions import (
    GenerationError,
    LoRAAdapterNotFoundError,
    MaxQueuedTokensError,
    QueueOverflowError,
    RetryableRequestError,
    VLLMClientError,
    VLLMValidationError,
)
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from fake_engine import (
    Failure,
    FakeEngineCore,
    FakeEngineServer,
    collect,
    failure_of,
    make_config,
    make_llm,
    read,
    within,
)
from tokenwire._contract import ERROR_DOMAIN, Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire_server import errors
from tokenwire_server.config import ServerConfig
from tokenwire_server.engine.engine import Engine
from tokenwire_server.errors import RequestError, Violation
from tokenwire_server.requests.server_state import State
from tokenwire_server.services.call_sink import CallSink

Code = grpc.StatusCode


class Row(NamedTuple):
    code: grpc.StatusCode
    retry: bool = False


TABLE = {
    Reason.INVALID_FIELD: Row(Code.INVALID_ARGUMENT),
    Reason.UNKNOWN_MODEL: Row(Code.NOT_FOUND),
    Reason.DUPLICATE_REQUEST_ID: Row(Code.ALREADY_EXISTS),
    Reason.TOKENIZER_REQUIRED: Row(Code.FAILED_PRECONDITION),
    Reason.ENGINE_ASLEEP: Row(Code.FAILED_PRECONDITION),
    Reason.UNSUPPORTED_FIELD: Row(Code.UNIMPLEMENTED),
    Reason.UNSUPPORTED_METHOD: Row(Code.UNIMPLEMENTED),
    Reason.ENGINE_LOADING: Row(Code.UNAVAILABLE, retry=True),
    Reason.QUEUE_FULL: Row(Code.UNAVAILABLE, retry=True),
    Reason.QUEUED_TOKENS_LIMIT: Row(Code.UNAVAILABLE, retry=True),
    Reason.ENGINE_PAUSED: Row(Code.UNAVAILABLE, retry=True),
    Reason.DRAINING: Row(Code.UNAVAILABLE),
    Reason.ENGINE_DEAD: Row(Code.UNAVAILABLE),
    Reason.MESSAGE_TOO_LARGE: Row(Code.RESOURCE_EXHAUSTED),
    Reason.SLOW_READER: Row(Code.RESOURCE_EXHAUSTED),
    Reason.DEADLINE_EXCEEDED: Row(Code.DEADLINE_EXCEEDED),
    Reason.REQUEST_FAILED: Row(Code.INTERNAL),
    Reason.INTERNAL: Row(Code.INTERNAL),
    Reason.UNAUTHENTICATED: Row(Code.UNAUTHENTICATED),
    Reason.PERMISSION_DENIED: Row(Code.PERMISSION_DENIED),
    Reason.HANDLE_IN_USE: Row(Code.ALREADY_EXISTS),
    Reason.UNKNOWN_HANDLE: Row(Code.NOT_FOUND),
}


def test_the_table_has_every_reason() -> None:
    assert set(errors._TABLE) == set(Reason) == set(TABLE)


@pytest.mark.parametrize("reason", Reason)
async def test_what_a_reason_becomes_on_the_wire(server: FakeEngineServer, reason: Reason) -> None:
    """FIELD_LOG 25."""
    violations = (Violation("input.a", "must be b"), Violation("input.c", "must be d"))
    server.core.refusal = RequestError(reason, "what happened", violations)
    failure = await failure_of(server.generate())
    row = TABLE[reason]
    assert failure == Failure(
        code=row.code,
        reason=str(reason),
        fields=("input.a", "input.c"),
        message="what happened",
        domain=ERROR_DOMAIN,
        descriptions=("must be b", "must be d"),
        retry_delay=1.0 if row.retry else None,
    )


async def test_a_failure_in_a_stream_comes_after_the_tokens_before_it(server: FakeEngineServer) -> None:
    call = server.stream()
    request = await server.core.next_request()
    request.step(5)
    message = await read(call)
    assert list(message.outputs[0].token_ids) == [5]
    server.core.die()
    failure = await failure_of(call.read())
    assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
    assert failure.retry_delay is None


@pytest.mark.parametrize(
    ("error", "reason", "fields"),
    [
        (EngineDeadError(), Reason.ENGINE_DEAD, ()),
        (QueueOverflowError(), Reason.QUEUE_FULL, ()),
        (MaxQueuedTokensError(), Reason.QUEUED_TOKENS_LIMIT, ()),
        (RetryableRequestError("paused"), Reason.ENGINE_PAUSED, ()),
        (LoRAAdapterNotFoundError("a", "/a"), Reason.UNKNOWN_MODEL, ("input.model",)),
        (VLLMValidationError("bad", parameter="top_p"), Reason.INVALID_FIELD, ("input.sampling_params.top_p",)),
        (VLLMValidationError("top_k must be small"), Reason.INVALID_FIELD, ("input.sampling_params.top_k",)),
        (VLLMValidationError("bad", parameter="cache_salt"), Reason.INVALID_FIELD, ("input.cache_salt",)),
        (VLLMValidationError("bad", parameter="prompt"), Reason.INVALID_FIELD, ("input.prompt_token_ids",)),
        (VLLMValidationError("bad", parameter="other"), Reason.INVALID_FIELD, ("input",)),
        (VLLMClientError("It cannot be done"), Reason.INVALID_FIELD, ("input.sampling_params",)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_what_vllm_raises(
    server: FakeEngineServer, error: Exception, reason: Reason, fields: tuple[str, ...]
) -> None:
    """FIELD_LOG 25."""
    server.core.refusal = error
    failure = await failure_of(server.generate())
    assert (failure.code, failure.reason, failure.fields) == (TABLE[reason].code, reason, fields)
    assert await failure_of(server.stream().read()) == failure


async def test_a_bug_tells_the_log_and_not_the_caller(
    server: FakeEngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.core.refusal = RuntimeError("secret prompt in /home/secret")
    for failure in (await failure_of(server.generate()), await failure_of(server.stream().read())):
        assert (failure.code, failure.reason) == (Code.INTERNAL, "INTERNAL")
        assert "secret" not in repr(failure)
    assert "secret prompt" in caplog.text
    server.core.refusal = None
    await server.check_alive()


async def test_an_output_that_cannot_be_read_fails_its_own_request_only(
    server: FakeEngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    broken = server.stream(sampling={"logprobs": 1})
    request = await server.core.next_request()
    other = server.generate()
    other_request = await server.core.next_request()
    server.core.play(
        (request, (5,), None, None, {"new_logprobs": ("secret",)}), (other_request, (6,), "length", None, {})
    )
    failure = await failure_of(broken.read())
    assert (failure.code, failure.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in repr(failure)
    assert list((await within(other)).outputs[0].token_ids) == [6]
    assert "could not deliver" in caplog.text
    assert await server.core.next_abort() == [request.internal_id]


@pytest.mark.parametrize("limit", [{"max_num_queued_reqs": 1}, {"max_num_queued_tokens": 2}])
async def test_a_full_queue_refuses_and_asks_to_come_back(tmp_path: Any, limit: dict[str, int]) -> None:
    """FIELD_LOG 52."""
    async with FakeEngineServer.run(make_config(tmp_path, **limit)) as server:
        first = server.generate()
        request = await server.core.next_request()
        failure = await failure_of(server.generate())
        reason = "QUEUE_FULL" if "max_num_queued_reqs" in limit else "QUEUED_TOKENS_LIMIT"
        assert (failure.code, failure.reason, failure.retry_delay) == (Code.UNAVAILABLE, reason, 1.0)
        request.step(5, finish="length")
        await within(first)
        await server.check_alive()


async def test_every_call_of_a_dead_engine_fails_alike(server: FakeEngineServer) -> None:
    unary, stream = server.generate(), server.stream()
    await server.core.next_requests(2)
    server.core.die()
    for call in (unary, stream.read(), server.generate(), server.stream().read()):
        failure = await failure_of(call)
        assert (failure.code, failure.reason, failure.retry_delay) == (Code.UNAVAILABLE, "ENGINE_DEAD", None)
    assert len(server.registry) == 0


async def test_a_loading_engine(vllm_config: VllmConfig) -> None:
    async with FakeEngineServer.run(vllm_config, ready=False) as server:
        calls = (
            server.generate(),
            server.stream().read(),
            server.stub.Abort(pb.AbortRequest(request_ids=["a"])),
            server.stub.GetEngineInfo(pb.GetEngineInfoRequest()),
        )
        for call in calls:
            failure = await failure_of(call)
            assert (failure.code, failure.reason, failure.retry_delay) == (Code.UNAVAILABLE, "ENGINE_LOADING", 1.0)
        server.serve()
        await server.check_alive()


async def test_a_draining_server_refuses_new_requests_and_ends_the_running_ones(server: FakeEngineServer) -> None:
    running = server.generate()
    request = await server.core.next_request()
    aborted = server.generate(request_id="a")
    await server.core.next_request()
    server.state.enter(State.DRAINING)
    for call in (server.generate(), server.stream().read()):
        failure = await failure_of(call)
        assert (failure.code, failure.reason, failure.retry_delay) == (Code.UNAVAILABLE, "DRAINING", None)
    assert await server.abort("a") == [pb.ABORT_OUTCOME_ABORTED]
    await within(aborted)
    request.step(5, finish="length")
    assert list((await within(running)).outputs[0].token_ids) == [5]
    await within(server.registry.idle())


async def test_a_field_that_the_engines_device_does_not_honour(vllm_config: VllmConfig) -> None:
    async with FakeEngineServer.run(vllm_config, refused_field=lambda _: "logit_bias") as server:
        failure = await failure_of(server.generate(sampling={"logit_bias": {1: 1.0}}))
    assert (failure.code, failure.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FIELD")
    assert failure.fields == ("input.sampling_params.logit_bias",)


async def test_a_model_that_does_not_generate(vllm_config: VllmConfig) -> None:
    core = FakeEngineCore()
    core.tasks = ("embed",)
    engine = Engine(await make_llm(vllm_config, core))
    with pytest.raises(RequestError, match="it supports embed") as caught:
        await engine.start()
    assert caught.value.reason == Reason.UNSUPPORTED_METHOD
    engine.shutdown()
    assert core.was_shut_down


async def test_prompt_logprobs_too_large_for_a_message_are_refused_before_the_work(vllm_config: VllmConfig) -> None:
    """FIELD_LOG 5."""
    config = ServerConfig(port=0, max_send_message_bytes=100)
    async with FakeEngineServer.run(vllm_config, server=config) as server:
        failure = await failure_of(server.generate(range(10), sampling={"prompt_logprobs": 2}))
        assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert failure.fields == ("input.sampling_params.prompt_logprobs",)
        assert server.core.idle


async def test_a_message_over_the_size_limit(vllm_config: VllmConfig) -> None:
    """FIELD_LOG 4."""
    config = ServerConfig(port=0, max_receive_message_bytes=1000)
    async with FakeEngineServer.run(vllm_config, server=config) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(server.generate([1] * 2000))
        assert caught.value.code() == Code.RESOURCE_EXHAUSTED
        await server.check_alive()


async def test_a_refused_stream_sends_no_message(server: FakeEngineServer) -> None:
    call = server.stream([])
    failure = await failure_of(collect(call))
    assert failure.reason == "INVALID_FIELD"


class _EngineError:
    """`vllm.outputs.RequestError`, which vLLM has since 0.33."""

    def __init__(self, exception: Exception) -> None:
        self.to_exception = lambda: exception


@pytest.mark.parametrize(
    ("exception", "code", "reason"),
    [
        (RetryableRequestError("Generation is paused."), Code.UNAVAILABLE, "ENGINE_PAUSED"),
        (VLLMValidationError("Invalid structured outputs: no"), Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (GenerationError("out of luck"), Code.INTERNAL, "REQUEST_FAILED"),
    ],
)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "ordinary"])
async def test_the_cause_that_the_engine_gives_for_an_error(
    exception: Exception, code: Code, reason: str, direct: bool
) -> None:
    """FAULTS G2: on the direct path with the output, on the ordinary one as an exception."""
    sink = CallSink(stream=True)
    if direct:
        output = SimpleNamespace(error=_EngineError(exception), new_token_ids=[], new_logprobs=None)
        sink.last_step(cast("Any", output), FinishReason.ERROR, None, None, None, None)
    else:
        sink.put(exception)
    with pytest.raises(RequestError) as failed:
        await within(sink.next())
    assert (failed.value.code, failed.value.reason) == (code, reason)
    assert str(exception).split(":")[0] in failed.value.message
