"""A server on the simulated device, and what tests say to it and see of it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest

from harness.server import ServerProcess
from harness.steps import Steps
from tokenwire.v1 import engine_load_pb2, generation_pb2, multiplex_pb2
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub
from tokenwire.v1.sampling_params_pb2 import SamplingParams
from tokenwire_server.simulated_device import write_model_folder
from tokenwire_server.simulated_device.step_log import Step, belongs

_T = TypeVar("_T")
_LIMIT = 60.0
_POLL = 0.005

both_paths = pytest.mark.parametrize("simulated", ["direct", "ordinary"], indirect=True)
"""Runs a test of tests/simulated on each of the two paths of outputs, not on the direct path alone."""

VOCABULARY = 32_000
MAX_NUM_SEQS = 64


async def within(awaitable: Awaitable[_T]) -> _T:
    """Wait with a limit, so that a hang fails the test and not the run."""

    async def wait() -> _T:
        return await awaitable

    return await asyncio.wait_for(wait(), _LIMIT)


async def read_to_end(call: Any) -> None:
    """Read a stream until it ends, which may be in an error."""
    while await within(call.read()) is not grpc.aio.EOF:
        pass


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true, with a limit."""
    async with asyncio.timeout(_LIMIT):
        while not condition():  # noqa: ASYNC110  # what it looks at is a file
            await asyncio.sleep(_POLL)


async def load_of(stub: EngineServiceStub) -> engine_load_pb2.EngineLoad:
    """Ask for the load."""
    response: pb.GetLoadResponse = await within(stub.GetLoad(pb.GetLoadRequest()))
    return response.load


async def load_when(
    stub: EngineServiceStub, condition: Callable[[engine_load_pb2.EngineLoad], bool]
) -> engine_load_pb2.EngineLoad:
    """Ask for the load until it is as wanted, with a limit."""
    async with asyncio.timeout(30):
        while not condition(load := await load_of(stub)):  # noqa: ASYNC110  # what it looks at is the server's
            await asyncio.sleep(0.01)
    return load


@dataclasses.dataclass
class Computed:
    """How much of a request the device has computed, in how many of its steps."""

    tokens: int = 0
    steps: int = 0
    seen: int = 0
    """Steps of the log that are counted."""


class Simulated:
    """A `tokenwire serve` on the simulated device, and its step log."""

    def __init__(self, server: ServerProcess, log: Path) -> None:
        self.server = server
        self.address = server.address
        self.log = log
        self._steps = Steps(log)
        self._computed: dict[str, Computed] = {}

    def steps(self) -> list[Step]:
        return self._steps.read()

    def held(self) -> list[str]:
        """The requests of the last step."""
        steps = self.steps()
        return steps[-1].held if steps else []

    def holds(self, request_id: str) -> bool:
        return any(belongs(internal, request_id) for internal in self.held())

    async def running(self, *request_ids: str) -> None:
        """Wait until the device holds the requests."""
        await until(lambda: all(self.holds(request_id) for request_id in request_ids))

    async def gone(self, *request_ids: str) -> None:
        """Wait until the engine has told the device to drop the requests, and check that no later step holds them."""
        waiting = set(request_ids)
        dropped_at: dict[str, int] = {}
        position = 0

        def all_dropped() -> bool:
            nonlocal position
            for step in self.steps()[position:]:
                for request_id in [name for name in waiting if any(belongs(one, name) for one in step.dropped)]:
                    dropped_at[request_id] = position
                position += 1
            return dropped_at.keys() == waiting

        await until(all_dropped)
        # An id may have been used several times: what counts is its last end.
        steps = self.steps()
        for request_id, dropped in dropped_at.items():
            assert not any(step.holds(request_id) for step in steps[dropped:])

    def computed(self, request_id: str) -> "Computed":
        """Return what the device has computed of a request so far."""
        computed = self._computed.setdefault(request_id, Computed())
        for step in self.steps()[computed.seen :]:
            tokens = step.computes(request_id)
            computed.tokens += tokens
            computed.steps += tokens > 0
            computed.seen += 1
        return computed

    def connect(self) -> grpc.aio.Channel:
        """Open another connection, not shared with any other channel."""
        return grpc.aio.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])


def generation_input(
    request_id: str, prompt: Iterable[int] = range(100, 228), *, max_tokens: int = 4000, **sampling: Any
) -> generation_pb2.GenerationInput:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return generation_pb2.GenerationInput(request_id=request_id, prompt_token_ids=prompt, sampling_params=params)


def submit(handle: int, message: generation_pb2.GenerationInput) -> pb.MultiplexRequest:
    return pb.MultiplexRequest(submit=multiplex_pb2.MultiplexSubmit(handle=handle, input=message))


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, device: str = "step_ms=5") -> Iterator[Simulated]:
    """Run a server for the time of the block."""
    log = folder / "steps.jsonl"
    model = write_model_folder(folder / "model", vocab_size=VOCABULARY)
    command = [str(model), "--max-model-len", "8192", "--max-num-seqs", str(MAX_NUM_SEQS)]
    with ServerProcess([*command, "--simulated-device", f"{device},step_log={log}", *arguments]) as server:
        yield Simulated(server, log)
