"""Trace context reaches the engine: from the request, or from the metadata of its call."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, within
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire.v1.multiplex_pb2 import MultiplexSubmit

METADATA = (("traceparent", "00-a-b-01"), ("tracestate", "c=d"), ("baggage", "e=f"), ("x-other", "g"), ("x-bin", b"h"))
CONTEXT = {"traceparent": "00-a-b-01", "tracestate": "c=d", "baggage": "e=f"}
OWN = {"traceparent": "00-own-b-01"}


@pytest.fixture
async def server(vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(vllm_config) as running:
        # vLLM drops trace headers where it exports no traces. An address in its configuration would make it connect.
        running.engine._llm.observability_config = SimpleNamespace(otlp_traces_endpoint="somewhere")
        yield running


async def arrived(server: FakeEngineServer, rpc: str, metadata: Any, headers: dict[str, str]) -> Any:
    message = GenerationInput(prompt_token_ids=[1], trace_headers=headers)
    call: Any
    match rpc:
        case "Generate":
            call = server.stub.Generate(pb.GenerateRequest(input=message), metadata=metadata)
        case "GenerateStream":
            call = server.stub.GenerateStream(pb.GenerateStreamRequest(input=message), metadata=metadata)
        case _:
            call = server.stub.Multiplex(metadata=metadata)
            await call.write(pb.MultiplexRequest(submit=MultiplexSubmit(handle=1, input=message)))
    reading = call if rpc == "Generate" else call.read()
    request = await server.core.next_request()
    request.step(5, finish="length")
    await within(reading)
    return request.request.trace_headers


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream", "Multiplex"])
@pytest.mark.parametrize(
    ("metadata", "headers", "expected"),
    [
        (None, {}, None),
        ((("x-other", "g"),), {}, None),
        (METADATA, {}, CONTEXT),
        (None, OWN, OWN),
        (METADATA, OWN, OWN),
    ],
    ids=["none", "other metadata", "metadata", "request", "both"],
)
async def test_trace_headers(
    server: FakeEngineServer, rpc: str, metadata: Any, headers: dict[str, str], expected: Any
) -> None:
    assert await arrived(server, rpc, metadata, headers) == expected
