"""More than a server can take: requests, bytes, readers that do not read. One server of its own.

Its memory is looked at through the kernel's high-water mark, so that no jump is missed between two looks.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tokenwire
from fake_engine.failures import Failure
from harness.simulated import VOCABULARY, Simulated, generation_input, serving, submit, until
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire_server.simulated_device.formula import expected_tokens

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(300)]

MIB = 2**20
LIMIT = 120.0
"""Seconds for a part of a test; a quiet machine needs a few."""
QUEUED = 256


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    options = ["--max-num-queued-reqs", str(QUEUED), "--max-num-seqs", str(QUEUED), "--slow-reader-timeout", "3"]
    with serving(tmp_path_factory.mktemp("overload"), *options, "--max-logprobs", "-1") as simulated:
        yield simulated


@pytest.fixture
async def stub(simulated: Simulated) -> AsyncIterator[EngineServiceStub]:
    async with simulated.connect() as channel:
        yield EngineServiceStub(channel)


class Memory:
    """The largest resident size of a process since this was made, compared with that at that time."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        # Sets the high-water mark to what is resident now.
        (self._folder / "clear_refs").write_text("5")
        self._before = self._peak()

    def grown(self) -> int:
        """Return by how many bytes the process was larger at its largest moment."""
        return self._peak() - self._before

    def _peak(self) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the kernel does not tell")


class LastStep(msgspec.Struct):
    held: list[str]


def held(log: Path) -> list[str]:
    """Return the requests of the log's last step; the whole log would take long to read again and again."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 100_000))
        lines = file.read().split(b"\n")
    # What follows the last line's end is empty, or half a line.
    return msgspec.json.decode(lines[-2], type=LastStep).held if len(lines) > 1 else []


async def test_two_hundred_readers_that_do_not_read(simulated: Simulated, stub: EngineServiceStub) -> None:
    """FIELD_LOG 55. They come first, into a server whose heap has no room yet."""
    connections, streams = 10, 16
    # Without bandwidth probing a connection's window stays at 64 KiB, which its streams fill soon.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    memory = Memory(simulated.server.pid)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(LIMIT):
        stalled: list[Any] = []
        for i in range(connections):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(simulated.address, options))
            slow = EngineServiceStub(channel)
            for j in range(streams):
                message = generation_input(f"stalled-{i}-{j}", logprobs=20, max_tokens=7000)
                stalled.append(slow.GenerateStream(pb.GenerateStreamRequest(input=message)))
            # Four of one Multiplex stream.
            call = slow.Multiplex()
            for j in range(4):
                await call.write(submit(j, generation_input(f"stalled-{i}-m{j}", logprobs=20, max_tokens=7000)))
            stalled.append(call)
        started: set[str] = set()

        def have_all_started() -> bool:
            # On a slow machine the first may be ended before the last has started.
            started.update(held(simulated.log))
            return len(started) == connections * (streams + 4)

        await until(have_all_started)
        for number in range(5):
            prompt = list(range(number + 10, number + 200))
            response = await stub.Generate(
                pb.GenerateRequest(input=generation_input(f"beside-{number}", prompt, max_tokens=10))
            )
            expected = expected_tokens(prompt, 10, vocab_size=VOCABULARY)
            assert list(response.outputs[0].token_ids) == expected
        await until(lambda: not held(simulated.log))
        grown = memory.grown()
        for call in stalled:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            failure = Failure.of(caught.value)
            assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
    # Five million values, and what gRPC holds.
    assert grown < 400 * MIB, f"the server has {grown / MIB:.0f} MiB more"


@contextlib.asynccontextmanager
async def health_answers(simulated: Simulated) -> AsyncIterator[list[int]]:
    """Ask for health all the time of the block; each answer comes within the call's deadline, or the test fails."""
    answers: list[int] = []

    async def ask(channel: grpc.aio.Channel) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            response = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            answers.append(response.status)
            await asyncio.sleep(0.02)

    async with simulated.connect() as channel:
        task = asyncio.create_task(ask(channel))
        try:
            yield answers
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


REFUSAL = (grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL", 1.0)


@dataclasses.dataclass
class Outcomes:
    """What became of requests."""

    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    refused: Counter[Any] = dataclasses.field(default_factory=Counter)


async def unary(stub: EngineServiceStub, number: int, message: pb.GenerateRequest, outcomes: Outcomes) -> None:
    try:
        response = await stub.Generate(message)
    except grpc.aio.AioRpcError as error:
        failure = Failure.of(error)
        outcomes.refused[failure.code, failure.reason, failure.retry_delay] += 1
    else:
        outcomes.tokens[number] = list(response.outputs[0].token_ids)


async def multiplex(
    stub: EngineServiceStub, messages: dict[int, generation_pb2.GenerationInput], outcomes: Outcomes
) -> None:
    call = stub.Multiplex()

    async def write() -> None:
        for number, message in messages.items():
            await call.write(submit(number, message))
        await call.done_writing()

    writing = asyncio.create_task(write())
    async for response in call:
        step = response.step
        assert not step.failed
        position = 0
        for i, handle in enumerate(step.handles):
            count = step.token_counts[i] if step.token_counts else 1
            outcomes.tokens.setdefault(handle, []).extend(step.token_ids[position : position + count])
            position += count
        for rejected in step.rejected:
            status = rejected.status
            delay = status.retry_delay.ToNanoseconds() / 1e9
            code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
            outcomes.refused[code, status.reason, delay] += 1
    await writing


async def test_two_thousand_long_prompts_at_once(simulated: Simulated) -> None:
    """FIELD_LOG 25, 52, 53."""
    count, max_tokens = 2000, 32
    prompt = list(range(3, 8003))
    template = generation_input("", prompt, max_tokens=max_tokens)
    inputs: dict[int, generation_pb2.GenerationInput] = {}
    for number in range(count):
        message = inputs[number] = generation_pb2.GenerationInput()
        message.CopyFrom(template)
        message.request_id = f"many-{number}"
        # Another output for each, though the prompt is the same.
        message.sampling_params.seed = number
    outcomes = Outcomes()
    memory = Memory(simulated.server.pid)
    async with (
        contextlib.AsyncExitStack() as stack,
        health_answers(simulated) as answers,
        asyncio.timeout(LIMIT),
        asyncio.TaskGroup() as group,
    ):
        stubs = [EngineServiceStub(await stack.enter_async_context(simulated.connect())) for _ in range(8)]
        for number in range(0, count, 2):
            request = pb.GenerateRequest(input=inputs[number])
            group.create_task(unary(stubs[number // 2 % 8], number, request, outcomes))
        for part in range(4):
            numbers = range(1 + 2 * part, count, 8)
            group.create_task(multiplex(stubs[part], {number: inputs[number] for number in numbers}, outcomes))
    grown = memory.grown()
    assert set(outcomes.refused) == {REFUSAL}
    assert len(outcomes.tokens) >= QUEUED
    assert len(outcomes.tokens) + outcomes.refused.total() == count
    for number, tokens in outcomes.tokens.items():
        assert tokens == expected_tokens(prompt, max_tokens, vocab_size=VOCABULARY, seed=number)
    assert set(answers) == {health_pb2.HealthCheckResponse.SERVING}
    assert grown < 256 * MIB, f"the server has {grown / MIB:.0f} MiB more"


# A call whose request is the field `input`, in it field 2, packed: 50 million ids of four bytes each.
IDS = 50_000_000
SERVICE = "/tokenwire.v1.EngineService"


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def raw_request() -> bytes:
    """Return a GenerateRequest with 50 million ids; as Python objects they would take gigabytes."""
    probe = pb.GenerateRequest(input=generation_pb2.GenerationInput(prompt_token_ids=[2**21])).SerializeToString()
    # Tag and length of the input, tag and length of the ids, one id.
    input_tag, ids_tag, one = probe[:1], probe[2:3], probe[4:]
    ids = one * IDS
    head = ids_tag + varint(len(ids))
    return input_tag + varint(len(head) + len(ids)) + head + ids


async def test_fifty_million_ids_are_refused_without_being_read(simulated: Simulated, stub: EngineServiceStub) -> None:
    """FIELD_LOG 4."""
    raw = raw_request()
    assert len(raw) > 200_000_000
    prompt = list(range(500, 600))
    other = stub.GenerateStream(
        pb.GenerateStreamRequest(input=generation_input("beside", prompt, max_tokens=4000)), timeout=LIMIT
    )
    first = await other.read()
    assert isinstance(first, pb.GenerateStreamResponse)
    tokens = list(first.outputs[0].token_ids)
    memory = Memory(simulated.server.pid)
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(simulated.address, options) as channel:
        methods: Any = channel
        unary = methods.unary_unary(f"{SERVICE}/Generate")(raw, timeout=LIMIT)
        stream = methods.unary_stream(f"{SERVICE}/GenerateStream")(raw, timeout=LIMIT)
        multiplex = methods.stream_stream(f"{SERVICE}/Multiplex")(timeout=LIMIT)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await multiplex.write(raw)
        for call in (unary, stream, multiplex):
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    grown = memory.grown()
    assert grown < 64 * MIB, f"the server has {grown / MIB:.0f} MiB more"
    for _ in range(50):
        message = await other.read()
        assert isinstance(message, pb.GenerateStreamResponse)
        tokens += message.outputs[0].token_ids
    assert tokens == expected_tokens(prompt, len(tokens), vocab_size=VOCABULARY)
    other.cancel()


async def test_prompt_logprobs_of_a_long_prompt_come_or_are_refused_before_they_are_computed(
    simulated: Simulated,
) -> None:
    """FIELD_LOG 5."""
    prompt = range(3, 8003)
    async with tokenwire.AsyncClient(simulated.address) as client:
        params = tokenwire.SamplingParams(max_tokens=1, prompt_logprobs=80)
        result = await client.generate(prompt, params, timeout=LIMIT)
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs.logprobs) == len(prompt) - 1
        params = tokenwire.SamplingParams(max_tokens=1, prompt_logprobs=10_000)
        with pytest.raises(tokenwire.ResourceExhaustedError) as caught:
            await client.generate(prompt, params, request_id="too-large", timeout=LIMIT)
    assert caught.value.reason == tokenwire.Reason.MESSAGE_TOO_LARGE
    assert not any(step.holds("too-large") for step in simulated.steps())
