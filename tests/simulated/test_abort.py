"""Abort tells the truth, whatever it races with. FIELD_LOG 28, 29, 33, 35, 42."""

import asyncio

import grpc.aio
import pytest

from harness.simulated import Simulated, both_paths, generation_input, until, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

pytestmark = [pytest.mark.simulated, both_paths]

ABORT = generation_pb2.FINISH_REASON_ABORT


async def abort(stub: EngineServiceStub, *request_ids: str) -> list[pb.AbortOutcome.ValueType]:
    response = await within(stub.Abort(pb.AbortRequest(request_ids=request_ids)))
    assert [result.request_id for result in response.results] == list(request_ids)
    return [result.outcome for result in response.results]


def generate(
    stub: EngineServiceStub, request_id: str, max_tokens: int = 4000
) -> grpc.aio.UnaryUnaryCall[pb.GenerateRequest, pb.GenerateResponse]:
    return stub.Generate(pb.GenerateRequest(input=generation_input(request_id, max_tokens=max_tokens)))


async def test_when_abort_answers_no_later_step_holds_the_request(
    simulated: Simulated, stub: EngineServiceStub
) -> None:
    for turn in range(5):
        request_id = f"barrier-{turn}"
        call = generate(stub, request_id)
        await simulated.running(request_id)
        assert await abort(stub, request_id) == [pb.ABORT_OUTCOME_ABORTED]
        count = len(simulated.steps())
        response = await within(call)
        assert response.outputs[0].finish_reason == ABORT
        await within(generate(stub, f"after-{turn}", 5))
        assert not any(step.computes(request_id) for step in simulated.steps()[count:])


async def test_an_aborted_id_is_free_at_once(stub: EngineServiceStub) -> None:
    for _ in range(30):
        first = generate(stub, "reused")
        outcome = pb.ABORT_OUTCOME_NOT_FOUND
        while outcome != pb.ABORT_OUTCOME_ABORTED:
            (outcome,) = await abort(stub, "reused")
        second = await within(generate(stub, "reused", 3))
        assert len(second.outputs[0].token_ids) == 3
        assert second.outputs[0].finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert (await within(first)).outputs[0].finish_reason == ABORT


async def test_an_abort_at_the_moment_of_the_finish_says_what_the_call_says(
    simulated: Simulated, stub: EngineServiceStub
) -> None:
    told = set()
    loop = asyncio.get_running_loop()
    start = loop.time()
    for turn in range(3):
        await within(generate(stub, f"undisturbed-{turn}", 4))
    # The aborts come at all times from the start of a request to well after its end, on a slow machine too.
    longest_wait = (loop.time() - start) / 3 * 2.5
    async with simulated.connect() as other_channel:
        other = EngineServiceStub(other_channel)
        for turn in range(60):
            request_id = f"race-{turn}"
            call = generate(stub, request_id, 4)
            await asyncio.sleep(longest_wait * turn / 60)
            outcomes = await asyncio.gather(abort(stub, request_id), abort(other, request_id))
            response = await within(call)
            aborted = response.outputs[0].finish_reason == ABORT
            told.add(aborted)
            for (outcome,) in outcomes:
                assert outcome in {
                    pb.ABORT_OUTCOME_ABORTED if aborted else pb.ABORT_OUTCOME_ALREADY_FINISHED,
                    # Both aborts came before the request.
                    pb.ABORT_OUTCOME_NOT_FOUND,
                }
            # Whoever asks later hears the same.
            expected = pb.ABORT_OUTCOME_ABORTED if aborted else pb.ABORT_OUTCOME_ALREADY_FINISHED
            assert await abort(stub, request_id) == [expected]
    assert told == {True, False}


async def test_live_finished_unknown_and_repeated_ids_in_one_call(
    simulated: Simulated, stub: EngineServiceStub
) -> None:
    await within(generate(stub, "mixed-finished", 2))
    call = generate(stub, "mixed-live")
    longer = generate(stub, "mixed-live-longer-id", 300)
    await simulated.running("mixed-live", "mixed-live-longer-id")
    assert await abort(stub, "mixed-live", "mixed-finished", "mixed-unknown", "mixed-live") == [
        pb.ABORT_OUTCOME_ABORTED,
        pb.ABORT_OUTCOME_ALREADY_FINISHED,
        pb.ABORT_OUTCOME_NOT_FOUND,
        pb.ABORT_OUTCOME_ABORTED,
    ]
    assert (await within(call)).outputs[0].finish_reason == ABORT
    # Ids are compared as a whole.
    assert len((await within(longer)).outputs[0].token_ids) == 300


async def test_all_rollouts_get_their_partial_tokens_back(simulated: Simulated, stub: EngineServiceStub) -> None:
    """FIELD_LOG 42."""
    unary = [f"rollout-{i}" for i in range(20)]
    streams = [f"rollout-stream-{i}" for i in range(20)]
    calls = [generate(stub, request_id) for request_id in unary]
    tokens = dict.fromkeys(streams, 0)

    async def read(request_id: str) -> int:
        reason = 0
        request = pb.GenerateStreamRequest(input=generation_input(request_id, logprobs=1))
        async for response in stub.GenerateStream(request):
            for output in response.outputs:
                assert len(output.logprobs.logprobs) == len(output.token_ids)
                tokens[request_id] += len(output.token_ids)
                reason = output.finish_reason or reason
        return reason

    await simulated.running(*unary)
    # Begun after these have run, so that a token of each stream shows that those of that step have arrived as well.
    readers = [asyncio.create_task(read(request_id)) for request_id in streams]
    await until(lambda: all(tokens.values()))
    assert set(await abort(stub, *unary, *streams)) == {pb.ABORT_OUTCOME_ABORTED}
    for call in calls:
        response = await within(call)
        assert response.outputs[0].finish_reason == ABORT
        assert response.usage.completion_tokens == len(response.outputs[0].token_ids) > 0
    assert await within(asyncio.gather(*readers)) == [ABORT] * len(readers)
