"""What the engine's outputs become on the wire."""

import asyncio
import itertools
import json
import math
from typing import Any

import grpc
import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask, WeightVersionSpan
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics, RequestStateStats
from vllm.v1.outputs import LogprobsLists

from fake_engine import FakeEngineServer, collect, failure_of, read, within
from tokenwire.v1 import engine_service_pb2 as pb_service
from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1.engine_service_pb2 import GenerateResponse
from tokenwire.v1.sampling_params_pb2 import TokenIds
from tokenwire_server.conversion.outputs import to_chunk
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.services import responses


def output(*completions: CompletionOutput, finished: bool = True, **values: Any) -> RequestOutput:
    values = {"prompt_logprobs": None, **values}
    return RequestOutput("a", None, [1, 2, 3], outputs=list(completions), finished=finished, **values)


def completion(*token_ids: int, index: int = 0, **values: Any) -> CompletionOutput:
    values = {"cumulative_logprob": None, "logprobs": None, "finish_reason": "length", **values}
    return CompletionOutput(index, "", list(token_ids), **values)


def unary(engine_output: RequestOutput, **fields: Any) -> GenerateResponse:
    request = EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(), **fields)
    return responses.unary(request, to_chunk(engine_output))


def flat(*positions: tuple[list[int], list[float], int]) -> FlatLogprobs:
    """Build vLLM's flat form: for each position the ids, sampled first, their values, and the sampled one's rank."""
    values = FlatLogprobs()
    for token_ids, logprobs, rank in positions:
        ranks: Any = [rank, *range(1, len(token_ids))]
        values.append_fast(token_ids, logprobs, ranks, [None] * len(token_ids))
    return values


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected", "stop_token_id"),
    [
        ("stop", None, pb.FINISH_REASON_STOP, None),
        ("stop", 0, pb.FINISH_REASON_STOP, 0),
        ("stop", 17, pb.FINISH_REASON_STOP, 17),
        ("length", None, pb.FINISH_REASON_LENGTH, None),
        ("abort", None, pb.FINISH_REASON_ABORT, None),
        ("repetition", "repetition_detected", pb.FINISH_REASON_REPETITION, None),
    ],
)
def test_finish_reasons(reason: str, stop_reason: int | str | None, expected: int, stop_token_id: int | None) -> None:
    [sequence] = unary(output(completion(5, finish_reason=reason, stop_reason=stop_reason))).outputs
    assert sequence.finish_reason == expected
    assert (sequence.stop_token_id if sequence.HasField("stop_token_id") else None) == stop_token_id


def test_a_chunk_without_finish_says_so() -> None:
    chunk = to_chunk(output(completion(5, 6, finish_reason=None), finished=False))
    assert chunk.request_end is None
    assert chunk.outputs == [pb.SequenceOutput(token_ids=[5, 6])]


def test_logprobs_of_the_sampled_token_alone() -> None:
    logprobs = flat(([5], [-0.5], 3), ([6], [-1.5], 1))
    [sequence] = unary(output(completion(5, 6, logprobs=logprobs, cumulative_logprob=-2.0))).outputs
    assert list(sequence.logprobs.logprobs) == [-0.5, -1.5]
    assert list(sequence.logprobs.ranks) == [3, 1]
    assert sequence.logprobs.top_k == 0
    assert not sequence.logprobs.top_token_ids
    assert sequence.logprobs.cumulative_logprob == -2.0


def test_logprobs_with_two_most_likely_tokens() -> None:
    logprobs = flat(([5, 7, 8], [-3.0, -0.5, -1.0], 9), ([6, 6, 9], [-0.25, -0.25, -2.0], 1))
    [sequence] = unary(output(completion(5, 6, logprobs=logprobs, cumulative_logprob=-3.25))).outputs
    assert list(sequence.logprobs.logprobs) == [-3.0, -0.25]
    assert list(sequence.logprobs.ranks) == [9, 1]
    assert sequence.logprobs.top_k == 2
    assert list(sequence.logprobs.top_token_ids) == [7, 8, 6, 9]
    assert list(sequence.logprobs.top_logprobs) == [-0.5, -1.0, -0.25, -2.0]


def test_minus_infinity_and_nan_are_passed_on() -> None:
    logprobs = flat(([5, 7, 8], [-math.inf, math.nan, -math.inf], 9))
    [sequence] = unary(output(completion(5, logprobs=logprobs, cumulative_logprob=-math.inf))).outputs
    assert list(sequence.logprobs.logprobs) == [-math.inf]
    assert math.isnan(sequence.logprobs.top_logprobs[0])
    assert sequence.logprobs.top_logprobs[1] == -math.inf
    assert sequence.logprobs.cumulative_logprob == -math.inf


def prompt_logprobs(*positions: tuple[list[int], list[float], int]) -> FlatLogprobs:
    values = FlatLogprobs()
    values.append(None)
    for token_ids, logprobs, rank in positions:
        ranks: Any = [rank, *range(1, len(token_ids))]
        values.append_fast(token_ids, logprobs, ranks, [None] * len(token_ids))
    return values


def test_prompt_logprobs_start_at_the_second_token() -> None:
    values = prompt_logprobs(([2, 9], [-1.5, -0.5], 4), ([3, 3], [-0.25, -0.25], 1))
    message = unary(output(completion(5), prompt_logprobs=values)).prompt_logprobs
    assert message.offset == 1
    assert list(message.logprobs) == [-1.5, -0.25]
    assert list(message.ranks) == [4, 1]
    assert message.top_k == 1
    assert list(message.top_token_ids) == [9, 3]
    assert list(message.top_logprobs) == [-0.5, -0.25]


def test_prompt_logprobs_of_a_prompt_of_one_token_are_present_and_empty() -> None:
    response = unary(output(completion(5), prompt_logprobs=prompt_logprobs()))
    assert response.HasField("prompt_logprobs")
    assert not response.prompt_logprobs.logprobs


def test_scores_of_prompt_logprob_token_ids() -> None:
    """FIELD_LOG S7."""
    scores = np.array([[-1.0, -2.0], [-3.0, -math.inf]], dtype=np.float32)
    message = unary(output(completion(5), prompt_token_id_logprobs=scores)).prompt_logprobs
    assert list(message.token_id_logprobs) == [-1.0, -2.0, -3.0, -math.inf]


def test_usage_counts_all_sequences() -> None:
    response = unary(output(completion(5, 6, index=1), completion(7, index=0), num_cached_tokens=2))
    assert [sequence.index for sequence in response.outputs] == [0, 1]
    assert response.usage == pb.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2)


@pytest.mark.parametrize(("tokens", "cached", "expected"), [([5], 0, 0), ([5], None, None), ([], 0, None)])
def test_cached_tokens_are_absent_where_the_engine_has_not_told(
    tokens: list[int], cached: int | None, expected: int | None
) -> None:
    usage = unary(output(completion(*tokens), num_cached_tokens=cached)).usage
    assert (usage.cached_tokens if usage.HasField("cached_tokens") else None) == expected


def test_timing() -> None:
    stats = RequestStateStats(
        queued_ts=100.0, scheduled_ts=100.25, first_token_ts=101.0, last_token_ts=103.5, first_token_latency=1.5
    )
    timing = unary(output(completion(5), metrics=stats)).timing
    assert timing.queue_time.ToMilliseconds() == 250
    assert timing.time_to_first_token.ToMilliseconds() == 1500
    assert timing.total_time.ToMilliseconds() == 4000


def test_timing_of_a_request_that_never_ran_is_absent() -> None:
    assert not unary(output(completion(), metrics=RequestStateStats())).HasField("timing")


def test_sampling_mask() -> None:
    mask = SamplingMask([[1, 258], [70_000]])
    [sequence] = unary(output(completion(5, 6, sampling_mask=mask))).outputs
    assert list(sequence.sampling_mask.counts) == [2, 1]
    assert np.frombuffer(sequence.sampling_mask.token_ids, "<u4").tolist() == [1, 258, 70_000]


def test_routed_experts() -> None:
    experts = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    [sequence] = unary(output(completion(5, 6, routed_experts=experts))).outputs
    message = sequence.routed_experts
    assert (list(message.shape), message.dtype) == ([2, 3, 2], "uint8")
    assert np.array_equal(np.frombuffer(message.data, message.dtype).reshape(message.shape), experts)


def test_routed_experts_of_a_view_are_in_c_order() -> None:
    experts = np.arange(12, dtype=np.uint16).reshape(2, 3, 2).transpose(2, 1, 0)
    [sequence] = unary(output(completion(5, 6, routed_experts=experts))).outputs
    message = sequence.routed_experts
    assert np.array_equal(np.frombuffer(message.data, message.dtype).reshape(message.shape), experts)


def test_weight_versions() -> None:
    spans = [WeightVersionSpan("v1", 0, 1), WeightVersionSpan("v2", 1, 2)]
    [sequence] = unary(output(completion(5, 6, weight_versions=spans))).outputs
    assert [(span.version, span.start, span.end) for span in sequence.weight_versions] == [("v1", 0, 1), ("v2", 1, 2)]


def test_speculative_decoding() -> None:
    metrics = RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[3, 2, 1], num_draft_tokens=11)
    [sequence] = unary(output(completion(5, spec_decode_metrics=metrics))).outputs
    message = sequence.speculative_decoding
    assert (message.num_drafts, message.num_draft_tokens, message.num_accepted_tokens) == (6, 11, 4)


def test_transfer_parameters_come_back_as_json() -> None:
    kv = {"remote_port": 5600, "remote_block_ids": [1, 2], "nested": {"z": None, "a": 1.5}}
    response = unary(output(completion(5), kv_transfer_params=kv, ec_transfer_params={}))
    assert json.loads(response.kv_transfer_params_json) == kv
    # 5600, not 5600.0, and the order of the keys is kept.
    assert response.kv_transfer_params_json == json.dumps(kv)
    assert response.ec_transfer_params_json == "{}"
    assert not unary(output(completion(5))).HasField("kv_transfer_params_json")


def test_prompt_token_ids_come_back_only_where_asked_for() -> None:
    assert list(unary(output(completion(5)), return_prompt_token_ids=True).prompt_token_ids) == [1, 2, 3]
    assert not unary(output(completion(5))).prompt_token_ids


async def test_what_a_stream_says_first_and_last(server: FakeEngineServer) -> None:
    call = server.stream(request_id="a", return_prompt_token_ids=True)
    request = await server.core.next_request()
    request.step(5, prefill_stats=PrefillStats(num_prompt_tokens=3, num_cached_tokens=1))
    first = await read(call)
    request.step(6)
    middle = await read(call)
    request.step(7, finish="stop", stop=7, kv_transfer_params={"a": 1})
    last = await read(call)
    assert (await collect(call)) == []

    assert first == pb_service.GenerateStreamResponse(
        request_id="a", prompt_token_ids=[1, 2, 3], outputs=[pb.SequenceOutput(token_ids=[5])]
    )
    assert middle == pb_service.GenerateStreamResponse(outputs=[pb.SequenceOutput(token_ids=[6])])
    assert last == pb_service.GenerateStreamResponse(
        outputs=[pb.SequenceOutput(token_ids=[7], finish_reason=pb.FINISH_REASON_STOP, stop_token_id=7)],
        usage=pb.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1),
        kv_transfer_params_json='{"a": 1}',
    )


async def test_a_stream_of_three_sequences(server: FakeEngineServer) -> None:
    call = server.stream(sampling={"n": 3})
    sequences = await server.core.next_requests(3)
    server.core.play(*[(sequence, (10 + i,), None, None, {}) for i, sequence in enumerate(sequences)])
    messages = [await read(call)]
    sequences[1].step(20, finish="length")
    messages.append(await read(call))
    sequences[0].step(21, finish="stop")
    messages.append(await read(call))
    sequences[2].step(22, finish="stop", stop=22)
    messages += await collect(call)

    tokens: dict[int, list[int]] = {}
    finishes: list[tuple[int, int]] = []
    for message in messages:
        for sequence in message.outputs:
            tokens.setdefault(sequence.index, []).extend(sequence.token_ids)
            if sequence.finish_reason:
                finishes.append((sequence.index, sequence.finish_reason))
    assert tokens == {0: [10, 21], 1: [11, 20], 2: [12, 22]}
    assert finishes == [(1, pb.FINISH_REASON_LENGTH), (0, pb.FINISH_REASON_STOP), (2, pb.FINISH_REASON_STOP)]
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].usage.completion_tokens == 6


async def test_unary_sequences_come_by_index(server: FakeEngineServer) -> None:
    call = server.generate(sampling={"n": 2})
    first, second = await server.core.next_requests(2)
    second.step(5, finish="length")
    first.step(6, finish="stop")
    response = await within(call)
    assert [(sequence.index, list(sequence.token_ids)) for sequence in response.outputs] == [(0, [6]), (1, [5])]


def lists(*rows: tuple[list[int], list[float], int]) -> LogprobsLists:
    """Build the engine process's own form, from the same tuples as `flat`."""
    token_ids, logprobs, ranks = zip(*rows, strict=True)
    return LogprobsLists(np.array(token_ids), np.array(logprobs, dtype=np.float32), np.array(ranks))


ROWS = [
    ([5, 7, 8], [-3.0, -0.5, -1.0], 9),
    ([6, 6, 9], [-0.25, -0.25, -2.0], 1),
    ([9, 6, 9], [-2.5, -0.125, -2.5], 2),
    ([4, 1, 2], [-5.0, -0.75, -0.875], 30),
]


@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
@pytest.mark.parametrize("n", [1, 2])
async def test_logprobs_stay_in_their_columns_for_a_reader_that_lags(
    vllm_config: VllmConfig, direct_path: bool, n: int
) -> None:
    """FIELD_LOG S6."""
    async with FakeEngineServer.run(vllm_config, direct_path=direct_path) as server:
        call = server.stream(sampling={"logprobs": 2, "n": n})
        sequences = await server.core.next_requests(n)
        for i, row in enumerate(ROWS):
            finish = "length" if i == len(ROWS) - 1 else None
            for sequence in sequences:
                sequence.step(row[0][0], finish=finish, new_logprobs=lists(row))
        outputs = [output for message in await collect(call) for output in message.outputs]
    for index in range(n):
        columns = [output.logprobs for output in outputs if output.index == index]
        assert [output.token_ids for output in outputs if output.index == index] != []
        assert [x for column in columns for x in column.logprobs] == [-3.0, -0.25, -2.5, -5.0]
        assert [x for column in columns for x in column.ranks] == [9, 1, 2, 30]
        assert {column.top_k for column in columns} == {2}
        assert [x for column in columns for x in column.top_token_ids] == [7, 8, 6, 9, 6, 9, 1, 2]
        assert [x for column in columns for x in column.top_logprobs] == [
            -0.5, -1.0, -0.25, -2.0, -0.125, -2.5, -0.75, -0.875,
        ]  # fmt: skip
        assert columns[-1].cumulative_logprob == -10.75


@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
async def test_columns_that_another_request_of_the_batch_asked_for_are_left_out(
    vllm_config: VllmConfig, direct_path: bool
) -> None:
    async with FakeEngineServer.run(vllm_config, direct_path=direct_path) as server:
        call = server.generate(sampling={"logprobs": 1})
        request = await server.core.next_request()
        request.step(5, 6, finish="length", new_logprobs=lists(ROWS[0], ROWS[1]))
        [output] = (await within(call)).outputs
    assert list(output.logprobs.logprobs) == [-3.0, -0.25]
    assert output.logprobs.top_k == 1
    assert list(output.logprobs.top_token_ids) == [7, 6]


@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
async def test_weight_versions_of_a_request_that_lived_through_an_update(
    vllm_config: VllmConfig, direct_path: bool
) -> None:
    """FIELD_LOG 59."""
    async with FakeEngineServer.run(vllm_config, direct_path=direct_path) as server:
        call = server.generate()
        request = await server.core.next_request()
        request.step(5, 6, weight_version="v1")
        request.step(7, finish="length", weight_version="v2")
        [output] = (await within(call)).outputs
    assert [(span.version, span.start, span.end) for span in output.weight_versions] == [("v1", 0, 2), ("v2", 2, 3)]


async def test_a_request_that_the_engine_ends_with_an_error(server: FakeEngineServer) -> None:
    """FIELD_LOG 24."""
    call = server.stream()
    request = await server.core.next_request()
    request.step(5)
    await read(call)
    request.step(finish="error")
    failure = await failure_of(collect(call))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "REQUEST_FAILED")
    await server.check_alive()


@pytest.mark.parametrize("direct_path", [True, False], ids=["direct", "ordinary"])
@pytest.mark.parametrize(
    ("sampling", "k"),
    [({"logprobs": 5}, 5), ({"logprobs": 0}, 0), ({"logprob_token_ids": TokenIds(token_ids=[7, 5])}, 2)],
    ids=["5", "0", "ids"],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_the_width_of_logprobs_is_reported_without_a_token(
    vllm_config: VllmConfig, direct_path: bool, sampling: dict[str, Any], k: int, n: int
) -> None:
    """FAULTS B8: aborted in the queue, or before it arrives."""
    fields: dict[str, Any] = {"sampling": {**sampling, "n": n}}
    async with FakeEngineServer.run(vllm_config, direct_path=direct_path) as server:
        for rpc, early in itertools.product(("unary", "stream"), (False, True)):
            request_id = f"{rpc}-{early}"
            if early:
                _ = await server.abort(request_id, remember_unknown_for={"seconds": 10})
            if rpc == "unary":
                reading = asyncio.ensure_future(one(server.generate(request_id=request_id, **fields)))
            else:
                reading = asyncio.ensure_future(collect(server.stream(request_id=request_id, **fields)))
            if not early:
                await server.core.next_requests(n)
                _ = await server.abort(request_id)
            outputs = [output for message in await within(reading) for output in message.outputs]
            assert sorted(output.index for output in outputs) == list(range(n))
            for output in outputs:
                assert output.finish_reason == pb.FINISH_REASON_ABORT
                assert output.HasField("logprobs")
                assert (output.logprobs.top_k, len(output.logprobs.logprobs)) == (k, 0)


async def one(call: Any) -> list[Any]:
    return [await call]
