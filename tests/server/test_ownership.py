"""Who ends a request in the engine: whatever has an internal id and was not ended by the engine is aborted there.

Each test is a way in which a request was once left in the engine, or its end reported wrongly. `test_ownership_model.py`
looks for further ones.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from vllm.config import KVTransferConfig, VllmConfig
from vllm.exceptions import VLLMValidationError

from fake_engine import FakeEngineServer, collect, failure_of, make_config, read, within
from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2 import (
    ABORT_OUTCOME_ALREADY_FINISHED,
    ABORT_OUTCOME_NOT_FOUND,
    ABORT_OUTCOME_REMEMBERED,
)
from tokenwire.v1.generation_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    FINISH_REASON_TIME_LIMIT,
    GenerationInput,
)
from tokenwire.v1.multiplex_pb2 import MultiplexAbort, MultiplexStep, MultiplexSubmit
from tokenwire.v1.sampling_params_pb2 import SamplingParams
from tokenwire_server.access import caller
from tokenwire_server.config import ServerConfig
from tokenwire_server.conversion.outputs import to_chunk
from tokenwire_server.engine import sink
from tokenwire_server.errors import RequestError, engine_dead
from tokenwire_server.requests.server_state import State
from tokenwire_server.services.multiplex.handle import HandleSink

BROKEN = 13
"""A token with which an output cannot be converted, in the tests that break the conversion."""


@pytest.fixture(params=[True, False], ids=["direct", "ordinary"])
async def server(request: pytest.FixtureRequest, vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(vllm_config, direct_path=request.param) as running:
        yield running


@pytest.fixture
def broken_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the conversion of outputs with the token BROKEN, on both output paths."""
    feed = HandleSink.feed

    def broken_feed(self: HandleSink, token_ids: list[int], logprobs: Any) -> None:
        assert BROKEN not in token_ids
        feed(self, token_ids, logprobs)

    def broken_to_chunk(output: Any) -> Any:
        chunk = to_chunk(output)
        assert not any(BROKEN in sequence.token_ids for sequence in chunk.outputs)
        return chunk

    monkeypatch.setattr(HandleSink, "feed", broken_feed)
    monkeypatch.setattr(sink, "to_chunk", broken_to_chunk)


class Stream:
    """A Multiplex stream and its events."""

    def __init__(self, server: FakeEngineServer) -> None:
        self.call = server.stub.Multiplex()

    async def submit(self, handle: int, **fields: Any) -> None:
        message = GenerationInput(prompt_token_ids=[1, 2], **fields)
        await within(self.call.write(pb.MultiplexRequest(submit=MultiplexSubmit(handle=handle, input=message))))

    async def steps_until(self, is_last: Callable[[MultiplexStep], Any]) -> MultiplexStep:
        """Read steps up to one that fulfils a condition, and return all of them merged."""
        merged = MultiplexStep()
        while not is_last(merged):
            merged.MergeFrom((await read(self.call)).step)
        return merged


async def test_a_time_limit_ends_every_sequence_of_a_request(server: FakeEngineServer) -> None:
    """FAULTS A1."""
    stream = Stream(server)
    await stream.submit(
        1, request_id="a", sampling_params=SamplingParams(n=2, temperature=1), max_time=Duration(nanos=50_000_000)
    )
    step = await stream.steps_until(lambda step: any(finish.last for finish in step.finished))
    assert {finish.index: finish.finish_reason for finish in step.finished} == {
        0: FINISH_REASON_TIME_LIMIT,
        1: FINISH_REASON_TIME_LIMIT,
    }
    assert await server.abort("a") == [ABORT_OUTCOME_ALREADY_FINISHED]
    stream.call.cancel()


async def test_so_it_does_on_a_call_of_its_own(server: FakeEngineServer) -> None:
    call = server.stream(sampling={"n": 2, "temperature": 1.0}, max_time=Duration(nanos=50_000_000))
    outputs = [output for response in await collect(call) for output in response.outputs]
    assert [output.finish_reason for output in outputs] == [FINISH_REASON_TIME_LIMIT] * 2


@pytest.mark.usefixtures("broken_conversion")
async def test_an_output_that_cannot_be_delivered_ends_its_request_in_the_engine(server: FakeEngineServer) -> None:
    """FAULTS A2, A3. Outputs that are on their way already are nobody's, though the handle is free again."""
    stream = Stream(server)
    await stream.submit(1, request_id="first")
    first = await server.core.next_request()
    # Both are in the server's queue before it can abort anything.
    first.step(BROKEN)
    first.step(7)
    step = await stream.steps_until(lambda step: step.failed)
    assert [(failure.handle, failure.status.reason) for failure in step.failed] == [(1, Reason.INTERNAL)]
    assert await server.core.next_abort() == [first.internal_id]
    assert not step.token_ids
    await stream.submit(1, request_id="second")
    second = await server.core.next_request()
    second.step(8, finish="length")
    step = await stream.steps_until(lambda step: step.finished)
    assert (list(step.token_ids), step.finished[0].finish_reason) == ([8], FINISH_REASON_LENGTH)
    assert await server.abort("first") == [ABORT_OUTCOME_ALREADY_FINISHED]
    stream.call.cancel()
    await within(server.registry.idle())
    assert server.core.idle


@pytest.mark.usefixtures("broken_conversion")
async def test_a_last_output_that_cannot_be_delivered_needs_no_abort(server: FakeEngineServer) -> None:
    stream = Stream(server)
    await stream.submit(1)
    request = await server.core.next_request()
    request.step(BROKEN, finish="length")
    step = await stream.steps_until(lambda step: step.failed)
    assert step.failed[0].status.reason == Reason.INTERNAL
    await server.check_alive()
    assert server.core.idle
    stream.call.cancel()


async def test_a_handle_that_is_named_twice_in_an_abort(server: FakeEngineServer) -> None:
    """vLLM raises where an id is given twice in one abort, and then for every later abort of that request."""
    stream = Stream(server)
    await stream.submit(1)
    request = await server.core.next_request()
    await within(stream.call.write(pb.MultiplexRequest(abort=MultiplexAbort(handles=[1, 1]))))
    step = await stream.steps_until(lambda step: step.finished)
    assert step.finished[0].finish_reason == FINISH_REASON_ABORT
    assert await server.core.next_abort() == [request.internal_id]
    assert server.engine.unfinished == 0
    stream.call.cancel()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_ends_while_a_submit_is_on_its_way_into_the_engine(
    server: FakeEngineServer, n: int
) -> None:
    """FAULTS A4."""
    server.core.admission.clear()
    stream = Stream(server)
    await stream.submit(1, sampling_params=SamplingParams(n=n, temperature=1))
    request = await server.core.next_request()
    stream.call.cancel()
    assert request.internal_id in await server.core.next_abort()
    server.core.admission.set()
    await within(server.registry.idle())
    await server.check_alive()
    assert not server.core.live
    assert server.engine.unfinished == 0


async def test_a_slow_stream_that_is_given_up_while_a_submit_is_on_its_way(server: FakeEngineServer) -> None:
    """FAULTS A4, where nothing is cancelled."""
    server.core.admission.clear()
    stream = Stream(server)
    await stream.submit(1)
    request = await server.core.next_request()
    [reader] = server.host.slow_readers._readers
    reader.give_up(RequestError(Reason.SLOW_READER, "too slow"))
    server.core.admission.set()
    assert await server.core.next_abort() == [request.internal_id]
    assert (await failure_of(stream.call.read())).reason == Reason.SLOW_READER
    assert server.core.idle


REMOTE = {"do_remote_prefill": True, "remote_engine_id": "e"}


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream", "Multiplex"])
async def test_a_caller_without_permission_releases_its_remote_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rpc: str
) -> None:
    """FAULTS A5. A stream is refused as a whole, before it has a request."""

    def refuse(_context: Any) -> None:
        raise RequestError(Reason.PERMISSION_DENIED, "nobody")

    connector = KVTransferConfig(
        kv_connector="FetchingConnector", kv_role="kv_consumer", kv_connector_module_path="fake_engine.connector"
    )
    async with FakeEngineServer.run(make_config(tmp_path, kv_transfer_config=connector)) as server:
        monkeypatch.setattr(caller, "of", refuse)
        remote = json.dumps(REMOTE)
        match rpc:
            case "Generate":
                awaitable: Any = server.generate(kv_transfer_params_json=remote)
            case "GenerateStream":
                awaitable = server.stream(kv_transfer_params_json=remote).read()
            case _:
                awaitable = server.stub.Multiplex().read()
        assert (await failure_of(awaitable)).reason == Reason.PERMISSION_DENIED
        monkeypatch.undo()
        await server.check_alive()
        told = [request.sampling_params.extra_args["kv_transfer_params"] for request in server.core.released]
        assert told == ([] if rpc == "Multiplex" else [REMOTE])


async def test_a_request_that_vllm_refuses_is_as_if_it_had_never_been_seen(server: FakeEngineServer) -> None:
    """FAULTS A6."""
    server.core.refusal = VLLMValidationError("not like this", parameter="temperature")
    assert (await failure_of(server.generate(request_id="a"))).reason == Reason.INVALID_FIELD
    server.core.refusal = None
    assert await server.abort("a") == [ABORT_OUTCOME_NOT_FOUND]
    assert await server.abort("a", remember_unknown_for=Duration(seconds=60)) == [ABORT_OUTCOME_REMEMBERED]
    assert (await within(server.generate(request_id="a"))).outputs[0].finish_reason == FINISH_REASON_ABORT


@pytest.mark.parametrize("n", [1, 2])
async def test_a_submit_that_vllm_refuses_has_one_end(server: FakeEngineServer, n: int) -> None:
    """vLLM aborts what it has of a request with n > 1 by itself, which is nobody's ABORT."""
    server.core.refusal = VLLMValidationError("not like this", parameter="temperature")
    stream = Stream(server)
    await stream.submit(1, request_id="a", sampling_params=SamplingParams(n=n, temperature=1))
    step = await stream.steps_until(lambda step: step.rejected)
    assert not step.finished
    assert step.rejected[0].status.reason == Reason.INVALID_FIELD
    assert await server.abort("a") == [ABORT_OUTCOME_NOT_FOUND]
    server.core.refusal = None
    await stream.submit(1, request_id="a")
    (await server.core.next_request()).step(5, finish="length")
    step = await stream.steps_until(lambda step: step.finished)
    assert not step.rejected
    assert list(step.token_ids) == [5]
    assert server.engine.unfinished == 0
    stream.call.cancel()


async def test_a_bug_in_one_submit_does_not_end_the_stream(
    server: FakeEngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(server)
    await stream.submit(1)
    live = await server.core.next_request()
    monkeypatch.setattr(server.engine, "convert", None)
    await stream.submit(2)
    step = await stream.steps_until(lambda step: step.rejected)
    assert [(event.handle, event.status.reason) for event in step.rejected] == [(2, Reason.INTERNAL)]
    live.step(5, finish="length")
    step = await stream.steps_until(lambda step: step.finished)
    assert step.finished[0].handle == 1
    stream.call.cancel()


async def test_an_abort_that_waits_for_a_request_which_the_engine_then_refuses(server: FakeEngineServer) -> None:
    """FAULTS A6, with the abort in between."""
    server.core.admission.clear()
    call = asyncio.ensure_future(failure_of(server.generate(request_id="a")))
    await server.core.next_request()
    abort = asyncio.create_task(server.abort("a", remember_unknown_for=Duration(seconds=60)))
    while (live := server.registry.find(caller.Caller("", ""), "a")) is None or live.cut_short is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    server.registry.withdraw(live)
    assert await within(abort) == [ABORT_OUTCOME_REMEMBERED]
    call.cancel()


async def test_an_abort_that_is_left_while_one_of_its_requests_is_on_its_way(server: FakeEngineServer) -> None:
    """The others are aborted all the same, and the late one when it arrives."""
    running = server.generate(request_id="running")
    first = await server.core.next_request()
    server.core.admission.clear()
    late = server.generate(request_id="late")
    second = await server.core.next_request()
    abort = server.stub.Abort(pb.AbortRequest(request_ids=["running", "late"]))
    assert await server.core.next_abort() == [first.internal_id]
    abort.cancel()
    assert (await within(running)).outputs[0].finish_reason == FINISH_REASON_ABORT
    server.core.admission.set()
    assert await server.core.next_abort() == [second.internal_id]
    assert (await within(late)).outputs[0].finish_reason == FINISH_REASON_ABORT
    assert server.core.idle


@pytest.mark.parametrize("state", [State.DRAINING, State.DEAD])
async def test_an_idle_stream_ends_when_the_server_does_and_says_why(server: FakeEngineServer, state: State) -> None:
    idle, busy = Stream(server), Stream(server)
    await idle.submit(1)
    (await server.core.next_request()).step(5, finish="length")
    await idle.steps_until(lambda step: step.finished)
    await busy.submit(1)
    request = await server.core.next_request()
    server.state.enter(state)
    reason = Reason.DRAINING if state is State.DRAINING else Reason.ENGINE_DEAD
    assert (await failure_of(idle.call.read())).reason == reason
    request.step(5, finish="length")
    step = await busy.steps_until(lambda step: step.finished)
    assert step.finished[0].finish_reason == FINISH_REASON_LENGTH
    assert (await failure_of(busy.call.read())).reason == reason


async def test_an_engine_that_dies_while_a_submit_is_on_its_way(
    server: FakeEngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS A7."""
    server.core.admission.clear()
    stream = Stream(server)
    await stream.submit(1)
    await server.core.next_request()
    server.core.die()
    server.registry.fail_all(engine_dead())
    server.core.admission.set()
    step = await stream.steps_until(lambda step: step.failed or step.rejected)
    reasons = [event.status.reason for event in step.failed] + [event.status.reason for event in step.rejected]
    assert reasons == [Reason.ENGINE_DEAD]
    await within(stream.call.done_writing())
    assert await collect(stream.call) == []
    assert "unexpectedly" not in caplog.text


@pytest.mark.parametrize("limit", [1, 2])
async def test_duplicates_and_limits_are_refused_before_a_prompt_is_converted(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """FAULTS B14: a prompt may be long."""
    async with FakeEngineServer.run(vllm_config, server=ServerConfig(port=0, max_requests_per_client=limit)) as server:
        live = server.generate(request_id="a")
        request = await server.core.next_request()
        monkeypatch.setattr(server.engine, "convert", None)
        expected = Reason.QUEUE_FULL if limit == 1 else Reason.DUPLICATE_REQUEST_ID
        assert (await failure_of(server.generate(request_id="b" if limit == 1 else "a"))).reason == expected
        request.step(5, finish="length")
        await within(live)
