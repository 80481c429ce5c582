"""What vLLM answers with a mere ValueError, which could be anybody's fault, is checked before and is the caller's."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from fake_engine import FakeEngineServer, failure_of, make_config, within
from tokenwire.v1.sampling_params_pb2 import RepetitionDetectionParams, TokenIds

TRACE = {"trace_decode_token_ids": TokenIds(token_ids=[1])}


@pytest.fixture(scope="module")
def replay_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = make_config(tmp_path_factory.mktemp("model"))
    # Vllm turns it off on a machine without the runner that it needs.
    config.model_config.enable_trace_replay = True
    return config


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=2)}, "repetition_detection"),
        ({"bad_words_token_ids": [TokenIds(token_ids=[1])]}, "bad_words_token_ids"),
    ],
)
async def test_what_a_replayed_trace_excludes(replay_config: Any, others: dict[str, Any], names: str) -> None:
    async with FakeEngineServer.run(replay_config) as server:
        failure = await failure_of(server.generate(sampling=TRACE | others))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert failure.fields == ("input.sampling_params.trace_decode_token_ids",)
        assert f"cannot be combined with {names}" in failure.message


async def test_a_speculating_engine_replays_no_trace(replay_config: Any) -> None:
    async with FakeEngineServer.run(replay_config) as server:
        object.__setattr__(server.engine.limits, "speculative", True)
        failure = await failure_of(server.generate(sampling=TRACE))
        assert failure.fields == ("input.sampling_params.trace_decode_token_ids",)
        assert "speculative decoding" in failure.message


async def test_a_trace_arrives(replay_config: Any) -> None:
    async with FakeEngineServer.run(replay_config) as server:
        call = server.generate(sampling=TRACE)
        request = await server.core.next_request()
        assert request.params.trace_decode_token_ids == [1]
        request.step(1, finish="length")
        await within(call)


class Picky(AdapterLogitsProcessor):  # type: ignore[misc]  # mypy does not read vLLM
    """A custom logits processor as vLLM's documentation describes them."""

    @classmethod
    def validate_params(cls, params: Any) -> None:
        if (params.extra_args or {}).get("target", 0) < 0:
            raise ValueError("target must not be negative")


async def test_a_custom_logits_processor_refuses_its_arguments(tmp_path: Path) -> None:
    async with FakeEngineServer.run(make_config(tmp_path, logits_processors=[Picky])) as server:
        failure = await failure_of(server.generate(sampling={"extra_args_json": '{"target": -1}'}))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert failure.fields == ("input.sampling_params.extra_args_json",)
        assert "target must not be negative" in failure.message
        await server.check_alive()


async def test_prompt_logprobs_that_would_end_the_engine(tmp_path: Path) -> None:
    async with FakeEngineServer.run(make_config(tmp_path, enable_lora=True)) as server:
        failure = await failure_of(server.generate(sampling={"prompt_logprobs": 0}))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD")
        assert failure.fields == ("input.sampling_params.prompt_logprobs",)
        await server.check_alive()
