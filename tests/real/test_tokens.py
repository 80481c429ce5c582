"""The tokens are right: AsyncLLM's own, whichever RPC brings them, and every parameter does what it says."""

import math
from typing import Any

import pytest

import tokenwire
from tokenwire import AsyncClient, Delta, FinishReason, SamplingParams, SequenceOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
MEMBER = 4028  # " member"


async def deltas_of(client: AsyncClient, prompt: list[int], params: SamplingParams) -> list[Delta]:
    async with client.stream(prompt, params) as stream:
        return [delta async for delta in stream]


def parts_of(deltas: list[Delta], index: int = 0) -> list[SequenceOutput]:
    return [output for delta in deltas for output in delta.outputs if output.index == index]


def tokens_of(parts: list[SequenceOutput]) -> list[int]:
    return [token for part in parts for token in part.token_ids]


def assert_equals_reference(output: SequenceOutput, answer: dict[str, Any]) -> None:
    assert output.token_ids == answer["token_ids"]
    assert output.finish_reason == answer["finish_reason"]
    assert output.stop_token_id == answer["stop_reason"]


async def test_unary_tokens_are_those_of_async_llm(client: AsyncClient, reference: Any) -> None:
    result = await client.generate(reference.prompt, reference.sampling_params)
    (output,) = result.outputs
    assert_equals_reference(output, reference.answer)
    assert result.usage.prompt_tokens == len(reference.prompt)
    assert result.usage.completion_tokens == len(output.token_ids)
    logprobs = output.logprobs
    assert logprobs is not None
    assert logprobs.top_token_ids == reference.answer["top_token_ids"]
    # The wire has 32-bit floats, as the engine does.
    assert logprobs.logprobs == pytest.approx(reference.answer["logprobs"], rel=1e-6)
    assert logprobs.cumulative_logprob == pytest.approx(reference.answer["cumulative_logprob"], rel=1e-9)


async def test_streamed_tokens_are_those_of_async_llm(client: AsyncClient, reference: Any) -> None:
    parts = parts_of(await deltas_of(client, reference.prompt, reference.sampling_params))
    assert len(parts) > 1
    assert tokens_of(parts) == reference.answer["token_ids"]
    assert parts[-1].finish_reason == reference.answer["finish_reason"]
    assert parts[-1].stop_token_id == reference.answer["stop_reason"]
    assert all(part.finish_reason is None for part in parts[:-1])


async def test_the_answer_says_27(client: AsyncClient, prompt: list[int], tokenizer: Any) -> None:
    result = await client.generate(prompt, GREEDY)
    assert "27 member states" in tokenizer.decode(result.token_ids)


async def test_deltas_add_up_to_the_unary_result(client: AsyncClient, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=3)
    result = await client.generate(prompt, params, request_id="whole")
    deltas = await deltas_of(client, prompt, params)
    parts = parts_of(deltas)
    (whole,) = result.outputs
    assert tokens_of(parts) == whole.token_ids
    assert (parts[-1].finish_reason, parts[-1].stop_token_id) == (whole.finish_reason, whole.stop_token_id)
    assert whole.logprobs is not None
    columns = [part.logprobs for part in parts if part.logprobs is not None]
    assert [value for column in columns for value in column.logprobs] == whole.logprobs.logprobs
    assert [rank for column in columns for rank in column.ranks] == whole.logprobs.ranks
    assert [token for column in columns for token in column.top_token_ids] == whole.logprobs.top_token_ids
    assert [value for column in columns for value in column.top_logprobs] == whole.logprobs.top_logprobs
    assert columns[-1].cumulative_logprob == whole.logprobs.cumulative_logprob
    # Usage comes with the last message alone, and the id is in all of them.
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].usage == result.usage
    assert len({delta.request_id for delta in deltas}) == 1


async def test_natural_eos_is_a_stop_without_a_stop_token(client: AsyncClient, prompt: list[int]) -> None:
    """FIELD_LOG S2."""
    info = await client.engine_info()
    (output,) = (await client.generate(prompt, GREEDY)).outputs
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, None)
    assert output.token_ids[-1] == info.eos_token_ids[0]


async def test_ignore_eos_goes_on_to_max_tokens(client: AsyncClient, prompt: list[int]) -> None:
    result = await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (40, FinishReason.LENGTH)


async def test_min_tokens_keeps_eos_away(client: AsyncClient, prompt: list[int]) -> None:
    natural = len((await client.generate(prompt, GREEDY)).token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=natural + 8, min_tokens=natural + 4)
    assert len((await client.generate(prompt, params)).token_ids) >= natural + 4


async def test_a_stop_token_is_reported_and_kept(client: AsyncClient, prompt: list[int]) -> None:
    """FIELD_LOG 51."""
    params = SamplingParams(temperature=0.0, max_tokens=64, stop_token_ids=[MEMBER, 7])
    (output,) = (await client.generate(prompt, params)).outputs
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, MEMBER)
    assert output.token_ids.index(MEMBER) == len(output.token_ids) - 1


@pytest.mark.parametrize("k", [0, 1, 5])
async def test_logprobs_have_a_row_for_each_token(client: AsyncClient, prompt: list[int], k: int) -> None:
    result = await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6, logprobs=k))
    logprobs = result.outputs[0].logprobs
    assert logprobs is not None
    assert logprobs.top_k == k
    assert len(logprobs.logprobs) == len(logprobs.ranks) == 6
    assert len(logprobs.top_token_ids) == len(logprobs.top_logprobs) == 6 * k
    assert logprobs.cumulative_logprob == pytest.approx(sum(logprobs.logprobs), rel=1e-5)
    for position, token in enumerate(result.token_ids if k else ()):
        best = logprobs.top(position)
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
        if logprobs.ranks[position] == 1:
            assert best[0] == (token, logprobs.logprobs[position])


async def test_prompt_logprobs_cover_the_prompt_but_its_first_token(client: AsyncClient, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    result = await client.generate(prompt, params)
    logprobs = result.prompt_logprobs
    assert logprobs is not None
    assert (logprobs.offset, logprobs.top_k) == (1, 2)
    assert len(logprobs.logprobs) == len(logprobs.ranks) == len(prompt) - 1
    assert len(logprobs.top_token_ids) == len(logprobs.top_logprobs) == 2 * (len(prompt) - 1)
    assert all(math.isfinite(value) and value <= 0 for value in logprobs.logprobs)
    first, *later = await deltas_of(client, prompt, params)
    assert first.prompt_logprobs == logprobs
    assert all(delta.prompt_logprobs is None for delta in later)


async def test_three_sequences(client: AsyncClient, prompt: list[int]) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    result = await client.generate(prompt, params)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert [len(output.token_ids) for output in result.outputs] == [12, 12, 12]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    assert result.usage.completion_tokens == 36
    deltas = await deltas_of(client, prompt, params)
    for output in result.outputs:
        parts = parts_of(deltas, output.index)
        assert tokens_of(parts) == output.token_ids
        assert [part.finish_reason for part in parts if part.finish_reason] == [FinishReason.LENGTH]
        assert parts[-1].finish_reason == FinishReason.LENGTH


async def test_a_seed_makes_sampling_repeatable(client: AsyncClient, prompt: list[int]) -> None:
    """FIELD_LOG 47."""

    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=1.5, seed=seed, max_tokens=16, ignore_eos=True)

    first = (await client.generate(prompt, params(5))).token_ids
    assert (await client.generate(prompt, params(5))).token_ids == first
    assert (await client.generate(prompt, params(6))).token_ids != first


async def test_unset_temperature_is_not_zero(client: AsyncClient, prompt: list[int]) -> None:
    """FIELD_LOG 46."""
    greedy = (await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16))).token_ids
    sampled = [(await client.generate(prompt, SamplingParams(seed=s, max_tokens=16))).token_ids for s in range(3)]
    assert any(tokens != greedy for tokens in sampled)


async def test_bad_words_are_never_emitted(client: AsyncClient, prompt: list[int]) -> None:
    """FIELD_LOG 49."""
    free = (await client.generate(prompt, GREEDY)).token_ids
    start = free.index(MEMBER)
    pair = free[start : start + 2]
    # One id alone, and a sequence of two of which either may appear without the other.
    alone, *_ = free
    params = SamplingParams(temperature=0.0, max_tokens=64, bad_words_token_ids=[[alone], pair])
    tokens = (await client.generate(prompt, params)).token_ids
    assert alone not in tokens
    assert pair not in [tokens[i : i + 2] for i in range(len(tokens))]
    assert len(tokens) > 1


async def test_logit_bias_decides(client: AsyncClient, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={MEMBER: 100.0})
    assert (await client.generate(prompt, params)).token_ids == [MEMBER] * 5
    banned = SamplingParams(temperature=0.0, max_tokens=64, logit_bias={MEMBER: -100.0})
    assert MEMBER not in (await client.generate(prompt, banned)).token_ids


async def test_only_allowed_tokens_come(client: AsyncClient, prompt: list[int]) -> None:
    allowed = [34, 39, MEMBER]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, allowed_token_ids=allowed)
    tokens = (await client.generate(prompt, params)).token_ids
    assert len(tokens) == 24
    assert set(tokens) <= set(allowed)


async def test_max_tokens_ends_with_length(client: AsyncClient, prompt: list[int]) -> None:
    result = await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    assert (len(result.token_ids), result.finish_reason) == (1, FinishReason.LENGTH)


async def test_the_prompt_may_leave_room_for_one_token(client: AsyncClient, prompt: list[int]) -> None:
    info = await client.engine_info()
    assert info.max_model_len is not None
    full = (prompt * 100)[: info.max_model_len - 1]
    result = await client.generate(full, SamplingParams(temperature=0.0, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (1, FinishReason.LENGTH)


def test_the_blocking_client(server: Any, prompt: list[int], tokenizer: Any) -> None:
    with tokenwire.Client(server.address) as client:
        client.wait_ready()
        result = client.generate(prompt, GREEDY)
        with client.stream(prompt, GREEDY) as stream:
            tokens = [token for delta in stream for token in delta.token_ids]
    assert tokens == result.token_ids
    assert "27" in tokenizer.decode(tokens)


async def test_engine_info_is_the_models(client: AsyncClient, model: str) -> None:
    info = await client.engine_info()
    assert info.model == model
    assert (info.max_model_len, info.vocab_size, info.dtype) == (2048, 49152, "bfloat16")
    assert info.eos_token_ids == (2,)
    assert info.limits.max_num_seqs == 4
    assert info.kv_cache.num_blocks is not None
    assert info.kv_cache.num_blocks > 0
    assert info.contract_revision == tokenwire.CONTRACT_REVISION
