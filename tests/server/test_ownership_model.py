"""Random lives of requests against the registry, on both output paths, with what must hold of every one of them.

- What has an internal id and was not ended by the engine is aborted there: in the end the engine is empty.
- A handle's tokens belong to its request, and nothing of a request follows its end.
- An outcome is ABORTED if and only if the request's own caller was told ABORT.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig

from fake_engine import FakeEngineCore, make_llm, within
from fake_engine.fuzz import examples
from fake_engine.lives import BROKEN, Lives, told_to_call, told_to_stream
from tokenwire.v1.engine_service_pb2 import ABORT_OUTCOME_ABORTED, ABORT_OUTCOME_ALREADY_FINISHED
from tokenwire.v1.generation_pb2 import FINISH_REASON_ABORT
from tokenwire_server.conversion.outputs import to_chunk
from tokenwire_server.engine import direct, sink
from tokenwire_server.engine.engine import Engine
from tokenwire_server.services.call_sink import CallSink
from tokenwire_server.services.multiplex.handle import HandleSink

_WHICH = st.integers(0, 5)
_N = st.sampled_from([1, 1, 2])
_ID = st.sampled_from("abc")
_HANDLE = st.sampled_from([1, 2])
_SUBMIT = st.tuples(st.just("submit"), _HANDLE, _ID, _N)
_STEP = st.tuples(st.just("step"), _WHICH, st.integers(1, 3), st.sampled_from([None, None, "stop", "length"]))
_TURNS = st.tuples(st.just("turns"), st.integers(1, 5))
_NEW = st.one_of(st.tuples(st.just("generate"), _ID, _N, st.booleans()), _SUBMIT, _SUBMIT)
_CUT = st.one_of(
    st.tuples(st.just("abort"), st.lists(_ID, min_size=1, max_size=2, unique=True), st.sampled_from([None, 60.0])),
    st.tuples(st.just("abort_handles"), st.lists(_HANDLE, min_size=1, max_size=2)),
    st.tuples(st.just("leave_call"), _WHICH),
    st.tuples(st.just("leave_stream")),
    st.tuples(st.just("give_up"), _WHICH),
    st.tuples(st.just("max_time"), _WHICH),
)
_BREAK = st.tuples(st.just("break_output"), _WHICH, st.sampled_from([None, "stop"]))


def _on_its_way(new: Any, cut: Any, turns: Any) -> list[Any]:
    """Let something happen to a request between its registration and its arrival in the engine."""
    return [("hold", True), new, ("turns", 5), cut, turns, ("hold", False)]


def _refused(new: Any, turns: Any) -> list[Any]:
    return [("refuse", True), new, turns, ("turns", 5), ("refuse", False)]


_PART = st.one_of(
    st.lists(st.one_of(_NEW, _STEP, _TURNS), min_size=1, max_size=3),
    st.lists(st.one_of(_CUT, _BREAK, _TURNS), min_size=1, max_size=2),
    st.builds(lambda new, cut: [new, ("turns", 5), cut], _NEW, st.one_of(_CUT, _BREAK)),
    st.builds(_on_its_way, _NEW, _CUT, _TURNS),
    st.builds(_refused, _NEW, _TURNS),
)
_EVENTS = st.lists(_PART, min_size=1, max_size=8).map(lambda parts: [event for part in parts for event in part])


@contextlib.contextmanager
def breakable_conversion() -> Iterator[None]:
    """Fail the conversion of outputs with the token BROKEN, on both output paths."""

    def breakable(kind: Any) -> Any:
        feed = kind.feed

        def broken_feed(self: Any, token_ids: list[int], logprobs: Any) -> None:
            assert BROKEN not in token_ids
            feed(self, token_ids, logprobs)

        return mock.patch.object(kind, "feed", broken_feed)

    def broken_to_chunk(output: Any) -> Any:
        assert not any(BROKEN in completion.token_ids for completion in output.outputs)
        return to_chunk(output)

    with contextlib.ExitStack() as patches:
        for patch in (breakable(CallSink), breakable(HandleSink), mock.patch.object(sink, "to_chunk", broken_to_chunk)):
            patches.enter_context(patch)
        for module in (sink, direct):
            patches.enter_context(mock.patch.object(module.logger, "exception"))
        yield


async def live(config: VllmConfig, events: list[Any], *, dies: bool, direct_path: bool) -> None:
    core = FakeEngineCore()
    engine = Engine(await make_llm(config, core), direct_path=direct_path)
    lives = Lives(core, engine)
    aborts: list[asyncio.Task[dict[str, int]]] = []
    try:
        for name, *arguments in events:
            result = getattr(lives, name)(*arguments)
            if name == "abort":
                # One that finds a request on its way into the engine waits for it.
                aborts.append(asyncio.create_task(result))
            elif result is not None:
                await result
        if dies:
            await lives.turns()
            lives.die()
        lives.hold(held=False)
        answers = await within(asyncio.gather(*aborts))
        await lives.turns()
        check_registered_is_running(lives)
        await lives.end()
        check_nothing_is_left(lives)
        assert dies or engine.unfinished == 0
        check_outcomes(lives, answers)
    finally:
        await engine.close()


def check_registered_is_running(lives: Lives) -> None:
    """What the engine runs is just what is registered and was not ended."""
    running = {len(request.request.prompt_token_ids) for request in lives.core.live.values()}
    registered = {len(live.request.prompt_token_ids) for live in lives.registry._live.values() if not live.sink.ended}
    assert lives.dead or running == registered
    assert lives.dead or all(live.cut_short is None for live in lives.registry._live.values())


def check_nothing_is_left(lives: Lives) -> None:
    assert len(lives.registry) == 0
    assert not lives.registry._per_client
    assert lives.dead or not lives.core.live


def check_outcomes(lives: Lives, answers: list[dict[str, int]]) -> None:
    told = [told_to_call(call) for call in lives.calls]
    told += [ended for stream in lives.streams for ended in told_to_stream(stream)]
    assert all(FINISH_REASON_ABORT not in ended.reasons for ended in told if ended.serial in lives.limited)
    told_abort = {ended.serial for ended in told if FINISH_REASON_ABORT in ended.reasons}
    for _, serial, outcome in lives.settled:
        # One that the engine refused is as if it had never been seen; one whose id was remembered ends without it.
        assert serial in lives.arrived | lives.left or outcome == ABORT_OUTCOME_ABORTED or lives.dead
        if outcome == ABORT_OUTCOME_ABORTED:
            assert serial in told_abort | lives.left
        else:
            assert serial not in told_abort
    settled = {(request_id, outcome) for request_id, _, outcome in lives.settled}
    for answer in answers:
        for request_id, outcome in answer.items():
            if outcome in {ABORT_OUTCOME_ABORTED, ABORT_OUTCOME_ALREADY_FINISHED}:
                assert (request_id, outcome) in settled


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
def test_random_lives(vllm_config: VllmConfig, direct_path: bool) -> None:
    """FAULTS A."""

    @examples(400)
    @given(_EVENTS, st.booleans())
    def run(events: list[Any], dies: bool) -> None:
        asyncio.run(live(vllm_config, events, dies=dies, direct_path=direct_path))

    with breakable_conversion():
        run()
