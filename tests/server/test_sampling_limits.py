"""What an engine's configuration rules out is refused by name before the request reaches it."""

import dataclasses
from typing import Any

import pytest
from vllm import envs

from fake_engine import FakeEngineServer
from fake_engine.server import generation_input
from tokenwire._contract import Reason
from tokenwire.v1.sampling_params_pb2 import TokenIds
from tokenwire_server.conversion.request import to_engine_request
from tokenwire_server.errors import RequestError

TRACE = TokenIds(token_ids=[1, 2])


def refusal(server: FakeEngineServer, sampling: dict[str, Any], **limits: Any) -> RequestError:
    changed = dataclasses.replace(server.engine.limits, **limits)
    message = generation_input([1, 2, 3], sampling, {})
    with pytest.raises(RequestError) as caught:
        to_engine_request(message, changed, {}, request_id="a", trace_headers=None, stream=False)
    # The same request is right for the engine as it is.
    assert (
        to_engine_request(message, server.engine.limits, {}, request_id="a", trace_headers=None, stream=False).params.n
        >= 1
    )
    return caught.value


@pytest.mark.parametrize(
    ("sampling", "limits", "field", "text"),
    [
        ({"temperature": 0.0}, {"sampling_masks": True}, "temperature", "returns sampling masks"),
        ({"top_k": 0}, {"sampling_masks": True}, "top_k", "returns sampling masks"),
        ({"top_k": -1}, {"sampling_masks": True}, "top_k", "returns sampling masks"),
        ({"n": 5}, {"max_num_seqs": 4}, "n", "the engine's max_num_seqs, 4, got 5"),
        ({"n": 5}, {"max_num_queued_reqs": 4}, "n", "the engine's max_num_queued_reqs, 4, got 5"),
        ({"logprobs": 5}, {"max_logprobs": 4}, "logprobs", "the engine's max_logprobs, 4"),
        ({"prompt_logprobs": 5}, {"max_logprobs": 4}, "prompt_logprobs", "the engine's max_logprobs, 4"),
    ],
    ids=str,
)
async def test_a_field_that_the_engine_rules_out(
    server: FakeEngineServer, sampling: dict[str, Any], limits: dict[str, Any], field: str, text: str
) -> None:
    error = refusal(server, sampling, **limits)
    assert error.reason == Reason.INVALID_FIELD
    assert [name for name, _ in error.violations] == [f"input.sampling_params.{field}"]
    assert text in error.message


async def test_an_engine_that_cannot_score_prompts(server: FakeEngineServer) -> None:
    error = refusal(server, {"prompt_logprobs": 0}, prompt_logprobs=False)
    assert error.reason == Reason.UNSUPPORTED_FIELD
    assert [name for name, _ in error.violations] == ["input.sampling_params.prompt_logprobs"]


async def test_vllms_own_limit_of_sequences(server: FakeEngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    message = generation_input([1, 2, 3], {"n": 3}, {})
    assert (
        to_engine_request(message, server.engine.limits, {}, request_id="a", trace_headers=None, stream=False).params.n
        == 3
    )
    monkeypatch.setattr(envs, "VLLM_MAX_N_SEQUENCES", 2, raising=False)
    with pytest.raises(RequestError, match="must be at most 2, got 3"):
        to_engine_request(message, server.engine.limits, {}, request_id="a", trace_headers=None, stream=False)
