"""Every way in which a caller goes away, by every RPC, in every state of its request: no later step holds the request.

A cell is one test: way x RPC x state, all on one server. These cells would make no sense and are not there:

- Generate that is blocked in a write: its only message is written after the engine has finished the request.
- GenerateStream that is blocked in a write while its request is queued or before its first token: there is nothing to
  write yet. A Multiplex stream is then blocked in the writes of another request.

FIELD_LOG 6, 36, 37, 43, 55.
"""

import itertools
from collections.abc import Iterator

import pytest

from harness import departures
from harness.departures import LONG, MAX_LOGPROBS, MAX_TOKENS, SHORT, Cell, Rpc, State, Way
from harness.simulated import Simulated, generation_input, load_when, serving, submit, until, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.engine_service_pb2_grpc import EngineServiceStub

pytestmark = pytest.mark.simulated

PLACES = 3
STEP_TOKENS = 16

_numbers = itertools.count()


async def until_waiting(stub: EngineServiceStub, count: int) -> None:
    """Wait until that many requests wait for a place."""
    _ = await load_when(stub, lambda load: load.ranks[0].num_waiting_reqs == count)


async def check_queued_cell(cell: Cell, way: Way, places: int) -> None:
    fillers = [f"full-{i}-{cell.request_id}" for i in range(places)]
    async with cell.simulated.connect() as channel:
        stub = EngineServiceStub(channel)
        filling = stub.Multiplex()
        for handle, name in enumerate(fillers):
            await filling.write(submit(handle, generation_input(name, SHORT, max_tokens=MAX_TOKENS)))
        if fillers:
            await cell.simulated.running(*fillers)
        async with way(cell) as leave:
            # The engine has it, the device does not.
            await until_waiting(stub, 1)
            await leave()
            await until_waiting(stub, 0)
            filling.cancel()
            await cell.simulated.gone(*fillers)
            await within(stub.Generate(pb.GenerateRequest(input=generation_input("next", max_tokens=3))))
    assert not any(step.computes(cell.request_id) for step in cell.simulated.steps())


async def check_unstarted_cell(cell: Cell, way: Way) -> None:
    async with way(cell) as leave:
        # On a machine that stands still for a moment a deadline may have passed by then.
        await until(lambda: cell.computed() > 0)
        await leave()
        await cell.simulated.gone(cell.request_id)
    assert 0 < cell.computed() < len(LONG)


async def check_running_cell(cell: Cell, way: Way) -> None:
    async with way(cell) as leave:
        await until(lambda: cell.computed() > len(SHORT))
        await leave()
        await cell.simulated.gone(cell.request_id)
    # Not because it has finished.
    assert cell.computed() < MAX_TOKENS


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    limits = ["--max-num-seqs", str(PLACES), "--max-num-batched-tokens", str(STEP_TOKENS)]
    folder = tmp_path_factory.mktemp("matrix")
    with serving(folder, *limits, "--max-logprobs", str(MAX_LOGPROBS), device="step_ms=10") as simulated:
        yield simulated


RPCS: tuple[Rpc, ...] = ("Generate", "GenerateStream", "Multiplex")
STATES: tuple[State, ...] = ("queued", "before the first token", "running")
WAYS: tuple[Way, ...] = (
    departures.reset,
    departures.killed,
    departures.cancelled,
    departures.deadline_over,
    departures.iterator_left,
)
BLOCKED_WAYS: tuple[Way, ...] = (departures.blocked_then_reset, departures.blocked_then_cancelled)
CELLS = [
    *itertools.product(WAYS, RPCS, STATES),
    *itertools.product(BLOCKED_WAYS, RPCS[1:2], STATES[2:]),
    *itertools.product(BLOCKED_WAYS, RPCS[2:], STATES),
]


@pytest.mark.parametrize(
    ("way", "rpc", "state"), CELLS, ids=[f"{way.__name__}-{rpc}-{state}" for way, rpc, state in CELLS]
)
async def test_no_later_step_holds_the_request(simulated: Simulated, way: Way, rpc: Rpc, state: State) -> None:
    cell = Cell(simulated, rpc, state, f"cell-{next(_numbers)}")
    match state:
        case "queued":
            # A stream that is blocked has a request of its own in the last place.
            await check_queued_cell(cell, way, PLACES - 1 if way in BLOCKED_WAYS else PLACES)
        case "before the first token":
            await check_unstarted_cell(cell, way)
        case "running":
            await check_running_cell(cell, way)
