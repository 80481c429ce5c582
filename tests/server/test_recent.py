"""What is remembered of the past is bounded, and shared out fairly among principals."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from fake_engine import FakeEngineServer, failure_of, within
from fake_engine.fuzz import examples
from tokenwire.v1.engine_service_pb2 import (
    ABORT_OUTCOME_ABORTED,
    ABORT_OUTCOME_ALREADY_FINISHED,
    ABORT_OUTCOME_NOT_FOUND,
    ABORT_OUTCOME_REMEMBERED,
)
from tokenwire.v1.generation_pb2 import FINISH_REASON_ABORT
from tokenwire_server.access.caller import Caller
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.requests.fair_cache import FairCache
from tokenwire_server.requests.live_request import LiveRequest
from tokenwire_server.requests.registry import Registry
from tokenwire_server.services.call_sink import CallSink


def test_a_new_value_is_the_newest_and_the_oldest_goes() -> None:
    recent: FairCache[int] = FairCache(2)
    recent.put(("", "a"), 1)
    recent.put(("", "b"), 2)
    recent.put(("", "a"), 3)
    recent.put(("", "c"), 4)
    assert [recent.get(("", name)) for name in "abc"] == [3, None, 4]
    assert len(recent) == 2


_KEYS = st.tuples(st.sampled_from("pqr"), st.sampled_from("abcdefgh"))


@examples(200)
@given(st.lists(st.tuples(st.booleans(), _KEYS)))
def test_it_is_bounded_and_a_share_is_safe(actions: list[tuple[bool, tuple[str, str]]]) -> None:
    size, principals = 6, 3
    recent: FairCache[int] = FairCache(size)
    model: dict[tuple[str, str], int] = {}
    for number, (put, key) in enumerate(actions):
        if put:
            recent.put(key, number)
            model.pop(key, None)
            model[key] = number
        else:
            popped = recent.pop(key)
            assert popped is None or popped == model[key]
            model.pop(key, None)
        kept = {known: value for known in model if (value := recent.get(known)) is not None}
        assert len(recent) == len(kept) <= size
        for principal in "pqr":
            own = [known for known in model if known[0] == principal]
            # What is kept is the newest, and as many as the share at the least.
            count = sum(known[0] == principal for known in kept)
            assert all(known in kept for known in own[len(own) - count :])
            assert count >= min(len(own), size // principals)
        model = {known: model[known] for known in model if known in kept}


def register(registry: Registry, caller: Caller, request_id: str) -> LiveRequest:
    request = EngineRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams())
    return registry.register(caller, request, CallSink(stream=False))


async def test_one_principals_requests_push_out_nothing_of_anothers(vllm_config: VllmConfig) -> None:
    one, other = Caller("one", "one"), Caller("other", "other")
    async with FakeEngineServer.run(vllm_config) as server:
        registry = server.registry
        registry.finish(register(registry, one, "mine"))
        assert await registry.abort(one, ["early"], 60) == [ABORT_OUTCOME_REMEMBERED]
        for number in range(17_000):
            registry.finish(register(registry, other, f"r{number}"))
        await registry.abort(other, [f"s{number}" for number in range(101_000)], 60)
        assert await registry.abort(one, ["mine"], None) == [ABORT_OUTCOME_ALREADY_FINISHED]
        assert register(registry, one, "early").outcome == ABORT_OUTCOME_ABORTED
        # Its own are bounded all the same.
        assert await registry.abort(other, ["r0", "r16999"], None) == [
            ABORT_OUTCOME_NOT_FOUND,
            ABORT_OUTCOME_ALREADY_FINISHED,
        ]


async def test_an_abort_of_many_ids_leaves_turns_to_others(server: FakeEngineServer) -> None:
    """FAULTS C16."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    before = turns
    outcomes = await server.registry.abort(Caller("", ""), [f"r{number}" for number in range(10_000)], 60)
    assert set(outcomes) == {ABORT_OUTCOME_REMEMBERED}
    assert turns - before >= 10
    counting.cancel()


async def test_an_abort_that_is_cancelled_between_two_turns_aborts_what_it_has_found(server: FakeEngineServer) -> None:
    """FAULTS C16."""
    call = server.generate(request_id="a")
    request = await server.core.next_request()
    [caller] = [Caller(key[0], live.client) for key, live in server.registry._live.items()]
    abort = server.registry.abort(caller, ["a", *(f"r{number}" for number in range(10_000))], None)
    aborting = asyncio.create_task(abort)
    await asyncio.sleep(0)
    aborting.cancel()
    assert await server.core.next_abort() == [request.internal_id]
    assert (await within(call)).outputs[0].finish_reason == FINISH_REASON_ABORT


async def test_an_abort_does_not_wait_for_a_request_that_the_engine_has_refused(
    server: FakeEngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS C16: the refusal comes while the abort waits for another request."""
    add, arrived, go = server.core.add_request_async, asyncio.Event(), asyncio.Event()

    async def refuse_b(request: EngineCoreRequest) -> None:
        if request.external_req_id != "b":
            await add(request)
            return
        arrived.set()
        await go.wait()
        raise VLLMValidationError("not like this", parameter="temperature")

    monkeypatch.setattr(server.core, "add_request_async", refuse_b)
    server.core.admission.clear()
    first, second = server.generate(request_id="a"), server.generate(request_id="b")
    await server.core.next_request()
    await within(arrived.wait())
    aborting = asyncio.create_task(server.abort("a", "b"))
    async with asyncio.timeout(10):
        while any(live.cut_short is None for live in list(server.registry._live.values())[:1]):  # noqa: ASYNC110
            await asyncio.sleep(0)
    go.set()
    assert (await failure_of(second)).reason == "INVALID_FIELD"
    server.core.admission.set()
    assert await aborting == [ABORT_OUTCOME_ABORTED, ABORT_OUTCOME_NOT_FOUND]
    assert (await within(first)).outputs[0].finish_reason == FINISH_REASON_ABORT
