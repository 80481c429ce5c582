"""No message at all hurts the server: random and extreme values in every field of every method's request.

The messages are made from the contract's descriptors, so that fields and methods of later are in as they come.
`make soak` runs it longer, with other seeds.
"""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig

from fake_engine import read, within
from fake_engine.fuzz import REFUSALS, Rig, check_refusal, examples, messages
from tokenwire._contract import Reason
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire_server import errors

METHODS = pb.DESCRIPTOR.services_by_name["EngineService"].methods
ONE_REQUEST = [method for method in METHODS if not method.client_streaming]
MULTIPLEX = pb.MultiplexRequest.DESCRIPTOR


async def send(rig: Rig, method: MethodDescriptor, message: Any) -> None:
    call = getattr(rig.server.stub, method.name)(message)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await within(call)
    except grpc.aio.AioRpcError as error:
        assert check_refusal(error).fields  # noqa: PT017  # no error is right too
    await rig.check_empty()


@pytest.mark.parametrize("method", ONE_REQUEST, ids=[method.name for method in ONE_REQUEST])
@pytest.mark.timeout(1200)
def test_one_message(vllm_config: VllmConfig, method: MethodDescriptor) -> None:
    with Rig.run(vllm_config) as rig:

        @examples(150)
        @given(messages(method.input_type))
        def sent(message: Any) -> None:
            rig.do(send, rig, method, message)

        sent()


async def multiplex(rig: Rig, sequence: list[Any], *, answered: bool, half_close: bool) -> None:
    """Send a sequence on one stream and read until each message has been dealt with; then the caller goes away."""
    core = rig.server.core
    core.answer = [5] if answered else None
    call = rig.server.stub.Multiplex()
    for message in sequence:
        await call.write(message)
    if answered and half_close:
        await call.done_writing()
        async for response in call:
            check_step(response.step)
    else:
        # What comes last is answered last.
        await call.write(pb.MultiplexRequest())
        last = False
        while not last:
            response = await read(call)
            check_step(response.step)
            last = any("action" in rejection.status.message for rejection in response.step.rejected)
        call.cancel()
    core.answer = [5]
    await rig.check_empty()


def check_step(step: Any) -> None:
    for refused in (*step.rejected, *step.failed):
        error = errors.RequestError(Reason(refused.status.reason), refused.status.message)
        assert error.code in REFUSALS, refused


@pytest.mark.timeout(1200)
def test_sequences_on_a_multiplex_stream(vllm_config: VllmConfig) -> None:
    with Rig.run(vllm_config) as rig:

        @examples(150)
        @given(st.lists(messages(MULTIPLEX), max_size=5), st.booleans(), st.booleans())
        def sent(sequence: list[Any], answered: bool, half_close: bool) -> None:  # hypothesis gives them
            rig.do(lambda: multiplex(rig, sequence, answered=answered, half_close=half_close))

        sent()


def test_the_fuzz_finds_what_is_wrong(vllm_config: VllmConfig) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(AssertionError), Rig.run(vllm_config) as rig:
        # A task whose error nobody looks at.
        rig.do(lambda: asyncio.wait([asyncio.create_task(fail())]))
