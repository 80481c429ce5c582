"""Log probabilities that may not fit are refused before the engine works for them, on every RPC."""

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio

from fake_engine import Failure, FakeEngineServer, collect, make_config, read, within
from fake_engine.server import generation_input
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.multiplex_pb2 import MultiplexSubmit
from tokenwire.v1.sampling_params_pb2 import TokenIdRows, TokenIds
from tokenwire_server.config import ServerConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 2000
RPCS = ["Generate", "GenerateStream", "Multiplex"]
TWENTY = TokenIds(token_ids=range(20))

# Length of the prompt, sampling fields, the field at fault, and the RPCs that refuse it. At 5 bytes each, 20 top tokens
# and the token itself take 105 bytes.
Case: TypeAlias = tuple[int, dict[str, Any], str, list[str]]
CASES: list[Case] = [
    (3, {"logprobs": 20, "max_tokens": 20}, "logprobs", ["Generate"]),
    (3, {"logprobs": 20, "max_tokens": 19}, "", []),
    # Up to the end of the context.
    (3, {"logprobs": 20}, "logprobs", ["Generate"]),
    (3, {"logprobs": 20, "max_tokens": 5, "n": 4}, "logprobs", ["Generate"]),
    (3, {"logprobs": 20, "stream_interval": 20}, "logprobs", RPCS),
    (3, {"logprobs": -1, "max_tokens": 1}, "logprobs", RPCS),
    (3, {"logprob_token_ids": TWENTY, "max_tokens": 20}, "logprob_token_ids", ["Generate"]),
    (21, {"prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs", RPCS),
    (20, {"prompt_logprobs": 20, "max_tokens": 1}, "", []),
    # Each sequence has them in the engine.
    (11, {"prompt_logprobs": 20, "max_tokens": 1, "n": 2}, "prompt_logprobs", RPCS),
    (3, {"prompt_logprobs": -1, "max_tokens": 1}, "prompt_logprobs", RPCS),
    # Together.
    (11, {"prompt_logprobs": 20, "logprobs": 20, "max_tokens": 10}, "prompt_logprobs", ["Generate"]),
    (27, {"prompt_logprob_token_ids": TokenIdRows(rows=[TWENTY] * 26)}, "prompt_logprob_token_ids", RPCS),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEngineServer]:
    config = make_config(tmp_path_factory.mktemp("model"), max_logprobs=-1)
    async with FakeEngineServer.run(config, server=ServerConfig(port=0, max_send_message_bytes=LIMIT)) as running:
        running.core.answer = [5]
        yield running


async def refused(server: FakeEngineServer, rpc: str, prompt: range, sampling: dict[str, Any]) -> tuple[int, str, str]:
    """Return the code, the reason and the field of a refusal; 0 and nothing if the request has run."""
    if rpc == "Multiplex":
        call = server.stub.Multiplex()
        submit = MultiplexSubmit(handle=1, input=generation_input(prompt, sampling, {}))
        await call.write(pb.MultiplexRequest(submit=submit))
        while not (step := (await read(call)).step).rejected and not step.finished:
            pass
        call.cancel()
        for rejection in step.rejected:
            [violation] = rejection.status.field_violations
            return rejection.status.code, rejection.status.reason, violation.field.removeprefix("submit.")
        return 0, "", ""
    try:
        if rpc == "Generate":
            await within(server.generate(prompt, sampling=sampling))
        else:
            await collect(server.stream(prompt, sampling=sampling))
    except grpc.aio.AioRpcError as error:
        failure = Failure.of(error)
        return failure.code.value[0], failure.reason, failure.fields[0]
    return 0, "", ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[:60])
@pytest.mark.parametrize("rpc", RPCS)
async def test_a_size(server: FakeEngineServer, rpc: str, case: Case) -> None:
    """FAULTS B13."""
    length, sampling, field, refusing = case
    found = await refused(server, rpc, range(length), sampling)
    if rpc in refusing:
        assert found == (8, "MESSAGE_TOO_LARGE", f"input.sampling_params.{field}")
        assert not server.core.live
    else:
        assert found == (0, "", "")
