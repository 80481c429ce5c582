"""The columns of a Multiplex stream's messages, on both paths of outputs, and what ends a request of it with an error."""

from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from fake_engine import FakeEngineServer, collect, make_config, within
from fake_engine.server import generation_input
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2, multiplex_pb2
from tokenwire_server.services.multiplex.prompt_logprobs import VALUES_PER_PART

LENGTH, ABORT = generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_ABORT


@pytest.fixture(params=[True, False], ids=["direct", "ordinary"])
async def server(request: pytest.FixtureRequest, vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(vllm_config, direct_path=request.param) as running:
        yield running


class Stream:
    """A call of Multiplex, and what it has brought so far."""

    def __init__(self, server: FakeEngineServer) -> None:
        self.call: Any = server.stub.Multiplex()
        self.messages: list[pb.MultiplexResponse] = []

    async def submit(self, handle: int, prompt: Iterable[int] = (1, 2, 3), sampling: Any = None, **fields: Any) -> None:
        message = generation_input(prompt, sampling, fields)
        await self.call.write(pb.MultiplexRequest(submit=multiplex_pb2.MultiplexSubmit(handle=handle, input=message)))

    @property
    def steps(self) -> list[multiplex_pb2.MultiplexStep]:
        return [message.step for message in self.messages if message.HasField("step")]

    @property
    def finished(self) -> list[multiplex_pb2.MultiplexFinish]:
        return [finish for step in self.steps for finish in step.finished]

    @property
    def failed(self) -> list[tuple[int, str]]:
        return [(failure.handle, failure.status.reason) for step in self.steps for failure in step.failed]

    @property
    def rejected(self) -> list[tuple[int, str]]:
        return [(rejection.handle, rejection.status.reason) for step in self.steps for rejection in step.rejected]

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            message = await within(self.call.read())
            assert isinstance(message, pb.MultiplexResponse), "the stream has ended"
            self.messages.append(message)

    async def to_end(self) -> None:
        await self.call.done_writing()
        self.messages += await collect(self.call)

    def tokens(self, handle: int, index: int = 0) -> list[int]:
        tokens: list[int] = []
        for step in self.steps:
            position = 0
            for entry, found in enumerate(step.handles):
                count = step.token_counts[entry] if step.token_counts else 1
                if (found, step.indexes[entry] if step.indexes else 0) == (handle, index):
                    tokens += step.token_ids[position : position + count]
                position += count
        return tokens


def lists(*rows: tuple[list[int], list[float], int]) -> LogprobsLists:
    token_ids, logprobs, ranks = zip(*rows, strict=True)
    return LogprobsLists(np.array(token_ids), np.array(logprobs, dtype=np.float32), np.array(ranks))


async def test_entries_of_one_token_need_no_counts_and_others_have_them(server: FakeEngineServer) -> None:
    stream = Stream(server)
    await stream.submit(1)
    first = await server.core.next_request()
    await stream.submit(2)
    second = await server.core.next_request()
    server.core.play((first, (5,), None, None, {}), (second, (6,), None, None, {}))
    await stream.until(lambda: stream.tokens(1) and stream.tokens(2))
    assert not any(step.token_counts or step.indexes for step in stream.steps)
    server.core.play((first, (7, 8), "length", None, {}), (second, (9,), "length", None, {}))
    await stream.to_end()
    assert (stream.tokens(1), stream.tokens(2)) == ([5, 7, 8], [6, 9])
    [step] = [step for step in stream.steps if step.token_counts]
    assert (list(step.handles), list(step.token_counts)) == ([1, 2], [2, 1])
    assert [(finish.handle, finish.last, finish.usage.completion_tokens) for finish in stream.finished] == [
        (1, True, 3),
        (2, True, 2),
    ]


async def test_sequences_have_indexes_and_only_the_last_to_end_is_marked(server: FakeEngineServer) -> None:
    stream = Stream(server)
    await stream.submit(1, sampling={"n": 2})
    sequences = await server.core.next_requests(2)
    await stream.submit(2)
    other = await server.core.next_request()
    server.core.play((other, (3,), None, None, {}), (sequences[1], (5,), None, None, {}))
    await stream.until(lambda: stream.tokens(1, 1))
    sequences[1].step(6, finish="length")
    await stream.until(lambda: stream.finished)
    assert [(finish.index, finish.last, finish.HasField("usage")) for finish in stream.finished] == [(1, False, False)]
    sequences[0].step(7, finish="stop", stop=7)
    other.step(4, finish="length")
    await stream.to_end()
    assert (stream.tokens(1, 0), stream.tokens(1, 1), stream.tokens(2)) == ([7], [5, 6], [3, 4])
    [last] = [finish for finish in stream.finished if finish.handle == 1 and finish.last]
    assert (last.index, last.stop_token_id, last.usage.completion_tokens) == (0, 7, 3)
    assert last.usage.prompt_tokens == 3


async def test_logprobs_name_the_entries_that_have_them(server: FakeEngineServer) -> None:
    stream = Stream(server)
    await stream.submit(1)
    plain = await server.core.next_request()
    await stream.submit(2, sampling={"logprobs": 2})
    scored = await server.core.next_request()
    rows = [([5, 7, 8], [-3.0, -0.5, -1.0], 9), ([6, 6, 9], [-0.25, -0.25, -2.0], 1)]
    server.core.play((plain, (1,), None, None, {}), (scored, (5,), None, None, {"new_logprobs": lists(rows[0])}))
    await stream.until(lambda: stream.tokens(2))
    scored.step(6, finish="length", new_logprobs=lists(rows[1]))
    plain.step(2, finish="length")
    await stream.to_end()
    columns = [step.logprobs for step in stream.steps if step.HasField("logprobs")]
    assert [value for column in columns for value in column.logprobs] == [-3.0, -0.25]
    assert [rank for column in columns for rank in column.ranks] == [9, 1]
    assert [token for column in columns for token in column.top_token_ids] == [7, 8, 6, 9]
    assert [k for column in columns for k in column.top_ks] == [2, 2]
    # Together with the other request's entry the one with log probabilities is named; alone it needs no name.
    mixed = [step for step in stream.steps if step.HasField("logprobs") and len(step.handles) == 2]
    assert mixed
    assert all([step.handles[entry] for entry in step.logprobs.entries] == [2] for step in mixed)
    finishes = {finish.handle: finish for finish in stream.finished}
    assert finishes[2].cumulative_logprob == -3.25
    assert not finishes[1].HasField("cumulative_logprob")


def scores(positions: int, k: int) -> LogprobsTensors:
    shape = (positions, k + 1)
    return LogprobsTensors(
        torch.arange(positions * (k + 1), dtype=torch.int32).reshape(shape) % 900,
        -torch.arange(positions * (k + 1), dtype=torch.float32).reshape(shape) / 1000,
        torch.ones(positions, dtype=torch.int32),
    )


K = 20
PROMPT = [i % 900 + 3 for i in range(60)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of ten positions; a real one takes a prompt longer than the fake engine's."""
    assert VALUES_PER_PART > 10 * K
    monkeypatch.setattr("tokenwire_server.services.multiplex.prompt_logprobs.VALUES_PER_PART", 10 * K)


@pytest.mark.usefixtures("small_parts")
async def test_prompt_logprobs_come_in_parts_before_the_finish(server: FakeEngineServer) -> None:
    stream = Stream(server)
    await stream.submit(1, PROMPT, {"prompt_logprobs": K})
    request = await server.core.next_request()
    tensors = scores(len(PROMPT) - 1, K)
    request.step(5, finish="length", new_prompt_logprobs_tensors=tensors)
    await stream.to_end()
    parts = [message.prompt_logprobs.prompt_logprobs for message in stream.messages if not message.HasField("step")]
    assert [part.offset for part in parts] == [1, 11, 21, 31, 41, 51]
    assert {part.top_k for part in parts} == {K}
    values = [value for part in parts for value in part.logprobs]
    assert values == pytest.approx(tensors.logprobs[:, 0].tolist())
    assert sum(len(part.top_token_ids) for part in parts) == K * (len(PROMPT) - 1)
    # Nothing of a request follows its finish.
    assert stream.messages[-1].step.finished[0].handle == 1
    assert stream.tokens(1) == [5]


@pytest.mark.usefixtures("small_parts")
async def test_a_failure_drops_the_parts_that_are_left(server: FakeEngineServer) -> None:
    stream = Stream(server)
    await stream.submit(1, PROMPT, {"prompt_logprobs": K})
    failing = await server.core.next_request()
    await stream.submit(2)
    other = await server.core.next_request()
    server.core.play(
        (failing, (5,), None, None, {"new_prompt_logprobs_tensors": scores(len(PROMPT) - 1, K)}),
        (other, (6,), None, None, {}),
    )
    server.core.play((failing, (), "error", None, {}), (other, (7,), "length", None, {}))
    await stream.to_end()
    assert stream.failed == [(1, "REQUEST_FAILED")]
    assert stream.tokens(2) == [6, 7]
    failure = next(i for i, message in enumerate(stream.messages) if message.step.failed)
    assert all(message.HasField("step") for message in stream.messages[failure:])
    assert [finish.handle for finish in stream.finished] == [2]


async def test_the_engines_death_fails_each_request_once(server: FakeEngineServer) -> None:
    stream = Stream(server)
    for handle in (1, 2):
        await stream.submit(handle)
    await server.core.next_requests(2)
    server.core.die()
    await stream.until(lambda: len(stream.failed) == 2)
    await stream.submit(3)
    await stream.to_end()
    assert sorted(stream.failed) == [(1, "ENGINE_DEAD"), (2, "ENGINE_DEAD")]
    assert stream.rejected == [(3, "ENGINE_DEAD")]
    assert not stream.finished
    assert len(server.registry) == 0


async def test_an_error_of_one_request_leaves_the_others(server: FakeEngineServer) -> None:
    stream = Stream(server)
    for handle in (1, 2):
        await stream.submit(handle)
    failing, other = await server.core.next_requests(2)
    failing.step(5)
    await stream.until(lambda: stream.tokens(1))
    failing.step(finish="error")
    await stream.until(lambda: stream.failed)
    other.step(6, finish="length")
    await stream.to_end()
    assert stream.failed == [(1, "REQUEST_FAILED")]
    assert (stream.tokens(1), stream.tokens(2)) == ([5], [6])


@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
async def test_a_full_engine_rejects_a_submit_whose_handle_is_free_again(tmp_path: Path, direct_path: bool) -> None:
    config = make_config(tmp_path, max_num_queued_reqs=1)
    async with FakeEngineServer.run(config, direct_path=direct_path) as server:
        stream = Stream(server)
        await stream.submit(1)
        request = await server.core.next_request()
        await stream.submit(2)
        await stream.until(lambda: stream.rejected)
        request.step(5, finish="length")
        await stream.until(lambda: stream.finished)
        await stream.submit(2)
        (await server.core.next_request()).step(6, finish="length")
        await stream.to_end()
    assert stream.rejected == [(2, "QUEUE_FULL")]
    assert [finish.handle for finish in stream.finished] == [1, 2]
    assert (stream.tokens(1), stream.tokens(2)) == ([5], [6])


async def test_an_abort_in_the_stream_gives_the_tokens_so_far(server: FakeEngineServer) -> None:
    stream = Stream(server)
    await stream.submit(1)
    request = await server.core.next_request()
    request.step(5)
    await stream.until(lambda: stream.tokens(1))
    await stream.call.write(pb.MultiplexRequest(abort=multiplex_pb2.MultiplexAbort(handles=[1])))
    assert await server.core.next_abort() == [request.internal_id]
    await stream.to_end()
    assert stream.tokens(1) == [5]
    [finish] = stream.finished
    assert (finish.finish_reason, finish.last, finish.usage.completion_tokens) == (ABORT, True, 1)


@pytest.mark.parametrize("n", [1, 3])
async def test_an_id_that_an_abort_remembers_ends_on_arrival(server: FakeEngineServer, n: int) -> None:
    abort = pb.AbortRequest(request_ids=["late"])
    abort.remember_unknown_for.FromSeconds(60)
    response = await within(server.stub.Abort(abort))
    assert response.results[0].outcome == pb.ABORT_OUTCOME_REMEMBERED
    stream = Stream(server)
    await stream.submit(1, sampling={"n": n}, request_id="late")
    await stream.to_end()
    assert [(finish.index, finish.finish_reason, finish.last) for finish in stream.finished] == [
        (index, ABORT, index == n - 1) for index in range(n)
    ]
    assert stream.finished[-1].usage.completion_tokens == 0
    assert server.core.idle


async def test_a_call_that_is_cancelled_aborts_all_its_requests_in_one_message(server: FakeEngineServer) -> None:
    stream = Stream(server)
    for handle in range(3):
        await stream.submit(handle)
    requests = await server.core.next_requests(3)
    stream.call.cancel()
    assert sorted(await server.core.next_abort()) == sorted(request.internal_id for request in requests)
    await within(server.registry.idle())
