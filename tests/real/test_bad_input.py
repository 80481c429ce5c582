"""A request that is wrong is refused with the field at fault, and the engine serves the next one."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tokenwire import (
    AlreadyExistsError,
    AsyncClient,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    Reason,
    SamplingParams,
    StatusError,
    StructuredOutputsParams,
)

SHORT = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture(autouse=True)
async def serves_the_next_call(client: AsyncClient, prompt: list[int]) -> AsyncIterator[None]:
    yield
    result = await client.generate(prompt, SHORT)
    assert len(result.token_ids) == 2


async def refusals(client: AsyncClient, prompt: list[int], params: SamplingParams, **options: Any) -> list[StatusError]:
    """Return the errors of the unary and of the streaming call."""
    errors = []
    with pytest.raises(StatusError) as unary:
        await client.generate(prompt, params, **options)
    errors.append(unary.value)
    with pytest.raises(StatusError) as streaming:
        async with client.stream(prompt, params, **options) as stream:
            await anext(stream)
    errors.append(streaming.value)
    return errors


def fields_of(error: StatusError) -> list[str]:
    return [violation.field for violation in error.field_violations]


@pytest.mark.parametrize(
    ("bad_prompt", "field"),
    [
        ([], "input.prompt_token_ids"),
        ([1, 49152], "input.prompt_token_ids[1]"),
        ([2**31, 1], "input.prompt_token_ids[0]"),
        ([1, 2, 2**32 - 1], "input.prompt_token_ids[2]"),
        ([1] * 2048, "input.prompt_token_ids"),
        ([1] * 100_000, "input.prompt_token_ids"),
    ],
    ids=["empty", "vocab_size", "2^31", "2^32-1", "context", "far beyond the context"],
)
async def test_prompt(client: AsyncClient, bad_prompt: list[int], field: str) -> None:
    """FIELD_LOG S1."""
    for error in await refusals(client, bad_prompt, SHORT):
        assert isinstance(error, InvalidArgumentError)
        assert error.reason == Reason.INVALID_FIELD
        assert fields_of(error) == [field]
        assert not error.is_retry_safe


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 5, "temperature": 1.0}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"n": 2**32 - 1, "temperature": 1.0}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"stop_token_ids": [49152]}, "stop_token_ids[0]"),
        ({"logit_bias": {49152: 1.0}}, "logit_bias[49152]"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids.token_ids"),
        ({"allowed_token_ids": [49152]}, "allowed_token_ids.token_ids[0]"),
        ({"bad_words_token_ids": [[1], []]}, "bad_words_token_ids[1].token_ids"),
        ({"bad_words_token_ids": [[49152]]}, "bad_words_token_ids[0].token_ids[0]"),
        ({"bad_words_token_ids": [[1]] * 129}, "bad_words_token_ids"),
        ({"bad_words_token_ids": [[1] * 1025]}, "bad_words_token_ids"),
    ],
    ids=str,
)
async def test_sampling_params(client: AsyncClient, prompt: list[int], values: dict[str, Any], field: str) -> None:
    for error in await refusals(client, prompt, SamplingParams(**values)):
        assert isinstance(error, InvalidArgumentError)
        assert error.reason == Reason.INVALID_FIELD
        assert fields_of(error) == [f"input.sampling_params.{field}"]


async def test_unknown_model(client: AsyncClient, prompt: list[int]) -> None:
    for error in await refusals(client, prompt, SHORT, model="no-such-model"):
        assert isinstance(error, NotFoundError)
        assert error.reason == Reason.UNKNOWN_MODEL
        assert fields_of(error) == ["input.model"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"request_id": "with space"}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"priority": 1}, "priority"),
        ({"kv_hints_json": "[]"}, "kv_hints_json"),
        ({"max_time": 0}, "max_time"),
    ],
    ids=str,
)
async def test_options(client: AsyncClient, prompt: list[int], options: dict[str, Any], field: str) -> None:
    for error in await refusals(client, prompt, SHORT, **options):
        assert isinstance(error, InvalidArgumentError)
        assert fields_of(error) == [f"input.{field}"]


async def test_empty_abort_list(client: AsyncClient) -> None:
    """FIELD_LOG 32."""
    with pytest.raises(InvalidArgumentError) as caught:
        await client.abort([])
    assert fields_of(caught.value) == ["request_ids"]


async def test_live_duplicate_id(client: AsyncClient, prompt: list[int]) -> None:
    endless = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1900)
    async with client.stream(prompt, endless, request_id="one") as stream:
        await anext(stream)
        for error in await refusals(client, prompt, SHORT, request_id="one"):
            assert isinstance(error, AlreadyExistsError)
            assert error.reason == Reason.DUPLICATE_REQUEST_ID
        # The first one goes on untouched.
        assert (await anext(stream)).finish_reason is None


async def test_grammar_without_a_tokenizer(client: AsyncClient, prompt: list[int]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    for error in await refusals(client, prompt, params):
        assert isinstance(error, FailedPreconditionError)
        assert error.reason == Reason.TOKENIZER_REQUIRED
        assert "--keep-tokenizer" in error.message
