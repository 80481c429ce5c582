import struct
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

import tokenwire
from tokenwire import FinishReason, SequenceOutput
from tokenwire._sequence import FinishReason as _FinishReason
from tokenwire.v1 import engine_info_pb2, generation_pb2, logprobs_pb2
from tokenwire.v1 import engine_service_pb2 as pb

LOGPROBS: dict[str, Any] = {
    "logprobs": [-0.5, -1.0],
    "ranks": [1, 3],
    "top_k": 2,
    "top_token_ids": [7, 8, 9, 10],
    "top_logprobs": [-0.5, -2.0, -0.25, -0.75],
}
SEQUENCE = generation_pb2.SequenceOutput(
    index=1,
    token_ids=[7, 11],
    finish_reason=generation_pb2.FINISH_REASON_STOP,
    stop_token_id=0,
    logprobs=logprobs_pb2.Logprobs(**LOGPROBS, cumulative_logprob=-1.5),
    sampling_mask=generation_pb2.SamplingMask(counts=[1, 2], token_ids=struct.pack("<3I", 7, 11, 2**32 - 1)),
    routed_experts=generation_pb2.RoutedExperts(data=b"\x01\x02", shape=[1, 1, 2], dtype="uint8"),
    weight_versions=[generation_pb2.WeightVersionSpan(version="v1", start=0, end=2)],
    speculative_decoding=generation_pb2.SpeculativeDecoding(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=2),
)
TYPED_SEQUENCE = SequenceOutput(
    index=1,
    token_ids=[7, 11],
    finish_reason=FinishReason.STOP,
    stop_token_id=0,
    logprobs=tokenwire.Logprobs(**LOGPROBS, cumulative_logprob=-1.5),
    sampling_mask=tokenwire.SamplingMask([1, 2], [7, 11, 2**32 - 1]),
    routed_experts=tokenwire.RoutedExperts(b"\x01\x02", (1, 1, 2), "uint8"),
    weight_versions=(tokenwire.WeightVersionSpan("v1", 0, 2),),
    speculative_decoding=tokenwire.SpeculativeDecoding(1, 4, 2),
)
ONCE: dict[str, Any] = {
    "usage": generation_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0),
    "timing": generation_pb2.Timing(queue_time=Duration(seconds=1, nanos=500_000_000), total_time=Duration(seconds=2)),
    "prompt_logprobs": logprobs_pb2.PromptLogprobs(**LOGPROBS, offset=1, token_id_logprobs=[-3.0]),
    "prompt_token_ids": [4, 5],
    "kv_transfer_params_json": '{"port": 5600}',
    "ec_transfer_params_json": "{}",
}
TYPED_ONCE: dict[str, Any] = {
    "usage": tokenwire.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0),
    "timing": tokenwire.Timing(queue_time=1.5, total_time=2.0),
    "prompt_logprobs": tokenwire.PromptLogprobs(**LOGPROBS, offset=1, token_id_logprobs=[-3.0]),
    "prompt_token_ids": [4, 5],
    "kv_transfer_params_json": '{"port": 5600}',
    "ec_transfer_params_json": "{}",
}


@pytest.mark.parametrize(
    "message",
    [SEQUENCE, pb.GenerateResponse(request_id="r", outputs=[SEQUENCE], **ONCE), logprobs_pb2.PromptLogprobs(offset=1)],
)
def test_the_test_data_is_complete(message: Any) -> None:
    if message.DESCRIPTOR.name != "PromptLogprobs":
        assert {field.name for field, _ in message.ListFields()} == set(message.DESCRIPTOR.fields_by_name)


def test_sequence() -> None:
    assert SequenceOutput.from_proto(SEQUENCE) == TYPED_SEQUENCE


def test_running_sequence_has_tokens_only() -> None:
    message = generation_pb2.SequenceOutput(token_ids=[1, 2])
    assert SequenceOutput.from_proto(message) == SequenceOutput(index=0, token_ids=[1, 2])


def test_running_sequence_with_a_sampling_mask_has_not_finished() -> None:
    mask = generation_pb2.SamplingMask(counts=[1], token_ids=struct.pack("<I", 7))
    message = generation_pb2.SequenceOutput(token_ids=[7], sampling_mask=mask)
    expected = SequenceOutput(index=0, token_ids=[7], sampling_mask=tokenwire.SamplingMask([1], [7]))
    assert SequenceOutput.from_proto(message) == expected


def test_result_without_usage_has_none_counted() -> None:
    usage = tokenwire.Usage(prompt_tokens=0, completion_tokens=0)
    assert tokenwire.GenerateResult.from_proto(pb.GenerateResponse()).usage == usage


def test_result() -> None:
    message = pb.GenerateResponse(request_id="r", outputs=[SEQUENCE], **ONCE)
    expected = tokenwire.GenerateResult(request_id="r", outputs=[TYPED_SEQUENCE], **TYPED_ONCE)
    assert tokenwire.GenerateResult.from_proto(message) == expected


def test_first_and_last_delta() -> None:
    message = pb.GenerateStreamResponse(request_id="r", outputs=[SEQUENCE], **ONCE)
    expected = tokenwire.Delta(request_id="r", outputs=[TYPED_SEQUENCE], **TYPED_ONCE)
    assert tokenwire.Delta.from_proto(message, "other") == expected
    message.request_id = ""
    assert tokenwire.Delta.from_proto(message, "r") == expected


def test_delta_between() -> None:
    message = pb.GenerateStreamResponse(outputs=[generation_pb2.SequenceOutput(token_ids=[1])])
    delta = tokenwire.Delta.from_proto(message, "r")
    assert delta == tokenwire.Delta(request_id="r", outputs=[SequenceOutput(index=0, token_ids=[1])])
    assert (delta.token_ids, delta.finish_reason, delta.usage) == ([1], None, None)


def test_absent_is_none() -> None:
    assert tokenwire.Timing.from_proto(generation_pb2.Timing()) == tokenwire.Timing()
    assert tokenwire.Usage.from_proto(generation_pb2.Usage()).cached_tokens is None
    assert tokenwire.Logprobs.from_proto(logprobs_pb2.Logprobs()).cumulative_logprob is None


def test_shorthands_are_for_one_sequence() -> None:
    first, second = SequenceOutput(index=0, token_ids=[1]), SequenceOutput(index=1, token_ids=[2])
    assert tokenwire.Delta(request_id="r", outputs=[]).token_ids == []
    for outputs in ([first, second], [second]):
        with pytest.raises(ValueError, match="outputs"):
            _ = tokenwire.Delta(request_id="r", outputs=outputs).token_ids


@pytest.mark.parametrize("value", generation_pb2.FinishReason.values())
def test_finish_reason(value: int) -> None:
    name = generation_pb2.FinishReason.Name(value).removeprefix("FINISH_REASON_")  # type: ignore[arg-type]
    assert _FinishReason.from_proto(value) == (None if value == 0 else FinishReason[name])


def test_unknown_finish_reason_is_finished() -> None:
    message = generation_pb2.SequenceOutput.FromString(b"\x18\x63")  # finish_reason = 99
    assert SequenceOutput.from_proto(message).finish_reason is FinishReason.UNKNOWN


def test_unknown_abort_outcome() -> None:
    message = pb.AbortResult.FromString(b"\x10\x63")
    assert tokenwire.AbortResult.from_proto(message).outcome is tokenwire.AbortOutcome.UNKNOWN


def test_top_logprobs_by_token() -> None:
    assert TYPED_SEQUENCE.logprobs is not None
    assert TYPED_SEQUENCE.logprobs.top(1) == [(9, -0.25), (10, -0.75)]
    assert TYPED_SEQUENCE.logprobs.top(-1) == [(9, -0.25), (10, -0.75)]
    assert TYPED_ONCE["prompt_logprobs"].top(2) == [(9, -0.25), (10, -0.75)]
    with pytest.raises(ValueError, match="0 is not in range"):
        TYPED_ONCE["prompt_logprobs"].top(0)


def test_engine_info() -> None:
    message = engine_info_pb2.EngineInfo(
        model="m",
        served_model_names=["a", "b"],
        adapters=[engine_info_pb2.Adapter(name="l", path="/l")],
        max_model_len=8192,
        vocab_size=0,
        eos_token_ids=[2, 0],
        limits=engine_info_pb2.Limits(max_num_seqs=64, max_send_message_bytes=2**40),
        parallelism=engine_info_pb2.Parallelism(data_parallel_size=2),
        kv_cache=engine_info_pb2.KvCache(prefix_caching=False, kv_events_endpoints=["tcp://h:1"]),
        contract_revision=1,
        features=["multiplex"],
        tokenwire_version="1",
    )
    assert tokenwire.EngineInfo.from_proto(message) == tokenwire.EngineInfo(
        model="m",
        served_model_names=("a", "b"),
        adapters=(tokenwire.Adapter("l", "/l"),),
        max_model_len=8192,
        vocab_size=0,
        eos_token_ids=(2, 0),
        limits=tokenwire.Limits(max_num_seqs=64, max_send_message_bytes=2**40),
        parallelism=tokenwire.Parallelism(data_parallel_size=2),
        kv_cache=tokenwire.KvCache(prefix_caching=False, kv_events_endpoints=("tcp://h:1",)),
        contract_revision=1,
        features=frozenset({"multiplex"}),
        tokenwire_version="1",
    )
