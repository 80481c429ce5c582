"""Many requests on one stream, against the formula of the simulated device."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from harness.simulated import VOCABULARY, Simulated, both_paths, generation_input, read_to_end, submit, until, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2, multiplex_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire_server.simulated_device.formula import (
    TokenLogprobs,
    expected_logprobs,
    expected_prompt_logprobs,
    expected_tokens,
)

pytestmark = [pytest.mark.simulated, both_paths]


def device_tokens(prompt: list[int], count: int, seed: int | None = None) -> list[int]:
    return expected_tokens(prompt, count, vocab_size=VOCABULARY, seed=seed)


def device_logprobs(tokens: list[int], k: int) -> list[TokenLogprobs]:
    return expected_logprobs(tokens, k, vocab_size=VOCABULARY)


class Gathered:
    """What a stream has told, by handle and sequence."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.top_ids: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], multiplex_pb2.MultiplexFinish] = {}
        self.rejected: list[tuple[int, str]] = []
        self.failed: list[tuple[int, str]] = []
        self.accepted: dict[int, str] = {}
        self.prompt_logprobs: dict[int, list[float]] = defaultdict(list)
        self.steps = 0

    def add(self, message: pb.MultiplexResponse) -> None:
        if message.HasField("prompt_logprobs"):
            part = message.prompt_logprobs
            values = self.prompt_logprobs[part.handle]
            assert part.prompt_logprobs.offset == 1 + len(values)
            values.extend(part.prompt_logprobs.logprobs)
            assert not any(handle == part.handle for handle, _ in self.finished), "a part after the finish"
            return
        step = message.step
        self.steps += 1
        for accepted in step.accepted:
            self.accepted[accepted.handle] = accepted.request_id
        self._add_tokens(step)
        for finish in step.finished:
            assert (finish.handle, finish.index) not in self.finished
            self.finished[finish.handle, finish.index] = finish
        self.rejected += [(r.handle, r.status.reason) for r in step.rejected]
        self.failed += [(f.handle, f.status.reason) for f in step.failed]

    def _add_tokens(self, step: multiplex_pb2.MultiplexStep) -> None:
        entries = [(handle, step.indexes[i] if step.indexes else 0) for i, handle in enumerate(step.handles)]
        counts = step.token_counts or [1] * len(entries)
        position = 0
        for entry, count in zip(entries, counts, strict=True):
            assert entry[0] in self.accepted
            assert entry not in self.finished, "tokens after the finish"
            self.tokens[entry] += step.token_ids[position : position + count]
            position += count
        assert position == len(step.token_ids)
        if step.HasField("logprobs"):
            self._add_logprobs(step.logprobs, entries, list(counts))

    def _add_logprobs(
        self, columns: multiplex_pb2.MultiplexLogprobs, entries: list[tuple[int, int]], counts: list[int]
    ) -> None:
        chosen = list(columns.entries) or list(range(len(entries)))
        token = top = 0
        for entry, k in zip(chosen, columns.top_ks, strict=True):
            count = counts[entry]
            self.logprobs[entries[entry]] += columns.logprobs[token : token + count]
            self.top_ids[entries[entry]] += columns.top_token_ids[top : top + count * k]
            token += count
            top += count * k
        assert token == len(columns.logprobs) == len(columns.ranks)
        assert top == len(columns.top_token_ids) == len(columns.top_logprobs)


async def gather(call: "grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]") -> Gathered:
    """Read a stream to its end."""
    gathered = Gathered()
    while (message := await within(call.read())) is not grpc.aio.EOF:
        assert isinstance(message, pb.MultiplexResponse)
        gathered.add(message)
    return gathered


async def gather_until(
    call: "grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]",
    condition: Callable[[Gathered], bool],
    gathered: Gathered | None = None,
) -> Gathered:
    gathered = gathered or Gathered()
    while not condition(gathered):
        message = await within(call.read())
        assert isinstance(message, pb.MultiplexResponse), "the stream has ended"
        gathered.add(message)
    return gathered


def prompt_of(handle: int) -> list[int]:
    return [(handle * 131 + i) % 20_000 + 3 for i in range(100)]


async def test_a_hundred_requests_get_exactly_the_devices_tokens(stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    for handle in range(100):
        message = generation_input(f"hundred-{handle}", prompt_of(handle), max_tokens=20 + handle % 7)
        await call.write(submit(handle, message))
    await call.done_writing()
    gathered = await gather(call)
    for handle in range(100):
        expected = device_tokens(prompt_of(handle), 20 + handle % 7)
        assert gathered.tokens[handle, 0] == expected
        finish = gathered.finished[handle, 0]
        assert finish.last
        assert finish.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert finish.usage.prompt_tokens == 100
        assert finish.usage.completion_tokens == len(expected)
        assert gathered.accepted[handle] == f"hundred-{handle}"
    # One message for a step of up to 64 requests, and some for admissions: far fewer than tokens.
    assert gathered.steps < 500


async def test_logprobs_are_those_of_the_handles_that_asked(stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    asked = {1: 0, 2: None, 3: 5, 4: 1}
    for handle, k in asked.items():
        sampling = {} if k is None else {"logprobs": k}
        await call.write(submit(handle, generation_input("", prompt_of(handle), max_tokens=12, **sampling)))
    await call.done_writing()
    gathered = await gather(call)
    for handle, k in asked.items():
        tokens = gathered.tokens[handle, 0]
        assert len(tokens) == 12
        if k is None:
            assert (handle, 0) not in gathered.logprobs
            continue
        expected = device_logprobs(tokens, k)
        assert gathered.logprobs[handle, 0] == [entry.logprob for entry in expected]
        assert gathered.top_ids[handle, 0] == [i for entry in expected for i, _ in entry.top]
        assert gathered.finished[handle, 0].cumulative_logprob == pytest.approx(sum(e.logprob for e in expected))


async def test_sequences_and_prompt_logprobs(stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    prompt = [i % 20_000 + 3 for i in range(4000)]
    message = generation_input("", prompt, max_tokens=9, n=3, seed=5, prompt_logprobs=20)
    await call.write(submit(7, message))
    await call.write(submit(8, generation_input("", prompt_of(8), max_tokens=30)))
    await call.done_writing()
    gathered = await gather(call)
    for index in range(3):
        assert gathered.tokens[7, index] == device_tokens(prompt, 9, seed=5 + index)
    assert [gathered.finished[7, i].last for i in range(3)].count(True) == 1
    assert gathered.tokens[8, 0] == device_tokens(prompt_of(8), 30)
    expected = expected_prompt_logprobs(prompt, 20, vocab_size=VOCABULARY)
    assert gathered.prompt_logprobs[7] == [entry.logprob for entry in expected]


async def test_misuse_is_answered_and_the_other_requests_go_on(stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    await call.write(pb.MultiplexRequest())
    await call.write(submit(1, generation_input("misuse-live", prompt_of(1), max_tokens=200)))
    await call.write(submit(1, generation_input("misuse-handle", prompt_of(1))))
    await call.write(submit(2, generation_input("misuse-live", prompt_of(1))))
    await call.write(submit(3, generation_input("misuse-vocabulary", [2**31])))
    await call.write(pb.MultiplexRequest(submit=multiplex_pb2.MultiplexSubmit(handle=4)))
    await call.write(pb.MultiplexRequest(abort=multiplex_pb2.MultiplexAbort(handles=[99])))
    await call.write(pb.MultiplexRequest(abort=multiplex_pb2.MultiplexAbort()))
    await call.done_writing()
    gathered = await gather(call)
    assert gathered.rejected == [
        (0, "INVALID_FIELD"),
        (1, "HANDLE_IN_USE"),
        (2, "DUPLICATE_REQUEST_ID"),
        (3, "INVALID_FIELD"),
        (4, "INVALID_FIELD"),
        (99, "UNKNOWN_HANDLE"),
        (0, "INVALID_FIELD"),
    ]
    assert gathered.tokens[1, 0] == device_tokens(prompt_of(1), 200)
    assert gathered.accepted == {1: "misuse-live"}


async def test_bytes_that_are_no_message_end_the_stream_and_its_requests_alone(
    simulated: Simulated, channel: grpc.aio.Channel, stub: EngineServiceStub
) -> None:
    raw: Any = channel.stream_stream("/tokenwire.v1.EngineService/Multiplex")()
    await raw.write(submit(1, generation_input("malformed-live")).SerializeToString())
    await simulated.running("malformed-live")
    await raw.write(b"\xff\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError):
        await read_to_end(raw)
    await simulated.gone("malformed-live")
    await within(stub.Generate(pb.GenerateRequest(input=generation_input("", max_tokens=2))))


async def test_a_handle_and_an_id_are_free_after_their_finish(stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    for turn in range(20):
        await call.write(submit(5, generation_input("again", prompt_of(turn), max_tokens=3)))
        gathered = await gather_until(call, lambda g: (5, 0) in g.finished)
        assert not gathered.rejected
        assert gathered.tokens[5, 0] == device_tokens(prompt_of(turn), 3)
    await call.done_writing()
    await gather(call)


async def test_an_abort_in_the_stream_follows_its_submit(simulated: Simulated, stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    for handle in range(30):
        await call.write(submit(handle, generation_input(f"aborted-{handle}")))
        await call.write(pb.MultiplexRequest(abort=multiplex_pb2.MultiplexAbort(handles=[handle])))
    await call.done_writing()
    gathered = await gather(call)
    assert not gathered.rejected
    for handle in range(30):
        finish = gathered.finished[handle, 0]
        assert finish.finish_reason == generation_pb2.FINISH_REASON_ABORT
        assert finish.usage.completion_tokens == len(gathered.tokens[handle, 0])
        assert gathered.tokens[handle, 0] == device_tokens(list(range(100, 228)), len(gathered.tokens[handle, 0]))
    # A finish may come before the step in which the engine drops the request; no later one computes it.
    await until(lambda: not any(simulated.holds(f"aborted-{handle}") for handle in range(30)))
    count = len(simulated.steps())
    await within(stub.Generate(pb.GenerateRequest(input=generation_input("after-aborted", max_tokens=2))))
    later = simulated.steps()[count:]
    assert any(step.computes("after-aborted") for step in later)
    assert not any(step.computes(f"aborted-{handle}") for step in later for handle in range(30))


async def test_abort_by_id_from_another_connection(simulated: Simulated, stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    await call.write(submit(1, generation_input("elsewhere")))
    await call.write(submit(2, generation_input("elsewhere-2", prompt_of(2), max_tokens=100)))
    await simulated.running("elsewhere")
    async with simulated.connect() as other:
        response = await within(EngineServiceStub(other).Abort(pb.AbortRequest(request_ids=["elsewhere", "nobody"])))
    assert [result.outcome for result in response.results] == [
        pb.ABORT_OUTCOME_ABORTED,
        pb.ABORT_OUTCOME_NOT_FOUND,
    ]
    assert not simulated.holds("elsewhere")
    await call.done_writing()
    gathered = await gather(call)
    assert gathered.finished[1, 0].finish_reason == generation_pb2.FINISH_REASON_ABORT
    assert gathered.tokens[2, 0] == device_tokens(prompt_of(2), 100)


async def test_time_limit_and_remembered_abort(stub: EngineServiceStub) -> None:
    abort = pb.AbortRequest(request_ids=["remembered"])
    abort.remember_unknown_for.FromSeconds(60)
    assert (await within(stub.Abort(abort))).results[0].outcome == pb.ABORT_OUTCOME_REMEMBERED
    call = stub.Multiplex()
    limited = generation_input("limited")
    limited.max_time.FromMilliseconds(200)
    await call.write(submit(1, limited))
    await call.write(submit(2, generation_input("remembered", n=2, temperature=1)))
    await call.done_writing()
    gathered = await gather(call)
    assert gathered.finished[1, 0].finish_reason == generation_pb2.FINISH_REASON_TIME_LIMIT
    assert gathered.tokens[1, 0]
    for index in range(2):
        assert gathered.finished[2, index].finish_reason == generation_pb2.FINISH_REASON_ABORT
    assert gathered.finished[2, 1].usage.completion_tokens == 0


async def test_a_burst_does_not_hold_up_running_requests(simulated: Simulated, stub: EngineServiceStub) -> None:
    """While a thousand requests are admitted, the tokens of a running one keep coming, in many messages."""
    call = stub.Multiplex()
    await call.write(submit(0, generation_input("before-burst", prompt_of(0))))
    running = await gather_until(call, lambda g: bool(g.tokens))
    arrivals: list[str] = []

    async def read_running() -> None:
        while (message := await within(call.read())) is not grpc.aio.EOF:
            assert isinstance(message, pb.MultiplexResponse)
            running.add(message)
            arrivals.append("tokens")

    async with simulated.connect() as other, asyncio.TaskGroup() as group:
        burst = EngineServiceStub(other).Multiplex()

        async def send() -> None:
            for handle in range(1000):
                await burst.write(submit(handle, generation_input(f"burst-{handle}", max_tokens=2)))
            await burst.done_writing()

        reading = group.create_task(read_running())
        group.create_task(send())
        result = Gathered()
        while (message := await within(burst.read())) is not grpc.aio.EOF:
            assert isinstance(message, pb.MultiplexResponse)
            result.add(message)
            arrivals += ["accepted"] * len(message.step.accepted)
        await call.write(pb.MultiplexRequest(abort=multiplex_pb2.MultiplexAbort(handles=[0])))
        await call.done_writing()
        await within(reading)
    assert len(result.finished) == arrivals.count("accepted") == 1000
    assert running.finished[0, 0].finish_reason == generation_pb2.FINISH_REASON_ABORT
    assert running.tokens[0, 0] == device_tokens(prompt_of(0), len(running.tokens[0, 0]))
    # Admissions take longer than steps: a server that made them all at once would send one or two messages meanwhile.
    last = len(arrivals) - 1 - arrivals[::-1].index("accepted")
    assert arrivals[arrivals.index("accepted") : last].count("tokens") >= 10


async def test_a_half_closed_stream_with_nothing_to_do_ends(stub: EngineServiceStub) -> None:
    call = stub.Multiplex()
    await call.done_writing()
    assert await within(call.read()) is grpc.aio.EOF
    assert await within(call.code()) == grpc.StatusCode.OK


async def test_generate_and_stream_agree_with_multiplex(stub: EngineServiceStub) -> None:
    message = generation_input("", prompt_of(3), max_tokens=40, logprobs=2)
    unary = await within(stub.Generate(pb.GenerateRequest(input=message)))
    streamed = generation_pb2.SequenceOutput()
    async for response in stub.GenerateStream(pb.GenerateStreamRequest(input=message)):
        for output in response.outputs:
            streamed.MergeFrom(output)
    assert unary.outputs[0] == streamed
    assert list(unary.outputs[0].token_ids) == device_tokens(prompt_of(3), 40)
    expected = device_logprobs(list(unary.outputs[0].token_ids), 2)
    assert list(unary.outputs[0].logprobs.logprobs) == [entry.logprob for entry in expected]
    assert len(unary.outputs[0].logprobs.top_logprobs) == 80
