"""From the engine's chunks to VllmEngine's messages."""

import math
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as smg

from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1.logprobs_pb2 import Logprobs, PromptLogprobs
from tokenwire_server.conversion.outputs import Chunk, RequestEnd
from tokenwire_server.services.smg.responses import Answer

STOP, LENGTH, ABORT = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_ABORT


def answer(*, stream: bool, n: int = 1, cached_tokens: int | None = None) -> Answer:
    request = smg.GenerateRequest(tokenized={"input_ids": [1, 2, 3]}, stream=stream)
    return Answer(request, n, None, lambda _: cached_tokens)


def taken(
    answer: Answer, *outputs: pb.SequenceOutput, request_end: RequestEnd | None = None, **fields: Any
) -> list[Any]:
    """Give the messages for one chunk, each without the level that all have."""
    messages = list(answer.take(Chunk(list(outputs), request_end, **fields)))
    return [getattr(message, message.WhichOneof("response")) for message in messages]


def test_a_stream_has_chunks_and_a_complete_without_ids() -> None:
    stream = answer(stream=True)
    assert taken(stream, pb.SequenceOutput(token_ids=[5, 6])) == [
        smg.GenerateStreamChunk(token_ids=[5, 6], prompt_tokens=3, completion_tokens=2)
    ]
    assert not stream.done
    last = pb.SequenceOutput(token_ids=[7], finish_reason=LENGTH)
    assert taken(stream, last, request_end=RequestEnd(cached_tokens=2)) == [
        smg.GenerateStreamChunk(token_ids=[7], prompt_tokens=3, completion_tokens=1),
        smg.GenerateComplete(finish_reason="length", prompt_tokens=3, completion_tokens=3, cached_tokens=2),
    ]
    assert stream.done


def test_an_end_without_tokens_is_a_complete_alone() -> None:
    assert taken(answer(stream=True), pb.SequenceOutput(finish_reason=ABORT), request_end=RequestEnd()) == [
        smg.GenerateComplete(finish_reason="abort", prompt_tokens=3)
    ]


def test_without_a_stream_there_is_one_complete() -> None:
    unary = answer(stream=False)
    last = pb.SequenceOutput(token_ids=[5, 6], finish_reason=STOP)
    assert taken(unary, last, request_end=RequestEnd(cached_tokens=0)) == [
        smg.GenerateComplete(output_ids=[5, 6], finish_reason="stop", prompt_tokens=3, completion_tokens=2)
    ]


def test_without_a_stream_outputs_are_gathered() -> None:
    unary = answer(stream=False)
    logprobs = [Logprobs(logprobs=[-i], ranks=[i], top_k=1, top_token_ids=[i], top_logprobs=[-i]) for i in (1, 2)]
    assert taken(unary, pb.SequenceOutput(token_ids=[5], logprobs=logprobs[0])) == []
    last = pb.SequenceOutput(token_ids=[6], logprobs=logprobs[1], finish_reason=LENGTH)
    [complete] = taken(unary, last, request_end=RequestEnd())
    assert complete.output_ids == [5, 6]
    assert complete.completion_tokens == 2
    assert complete.output_logprobs == smg.OutputLogProbs(
        token_ids=[5, 6],
        token_logprobs=[-1.0, -2.0],
        top_logprobs=[{"values": [-1.0], "token_ids": [1]}, {"values": [-2.0], "token_ids": [2]}],
    )


def test_sequences_have_their_index_and_their_own_counts() -> None:
    stream = answer(stream=True, n=2, cached_tokens=1)
    both = (pb.SequenceOutput(index=1, token_ids=[7, 8]), pb.SequenceOutput(index=0, token_ids=[5], finish_reason=STOP))
    assert taken(stream, *both) == [
        smg.GenerateStreamChunk(token_ids=[5], prompt_tokens=3, completion_tokens=1),
        # The request goes on, so the engine has not told of its end.
        smg.GenerateComplete(finish_reason="stop", prompt_tokens=3, completion_tokens=1, cached_tokens=1),
        smg.GenerateStreamChunk(index=1, token_ids=[7, 8], prompt_tokens=3, completion_tokens=2),
    ]
    assert not stream.done
    last = pb.SequenceOutput(index=1, finish_reason=LENGTH)
    request_end = RequestEnd(cached_tokens=2, kv_transfer_params_json='{"a": 1}')
    assert taken(stream, last, request_end=request_end) == [
        smg.GenerateComplete(
            index=1,
            finish_reason="length",
            prompt_tokens=3,
            completion_tokens=2,
            cached_tokens=2,
            kv_transfer_params_json='{"a": 1}',
        )
    ]
    assert stream.done


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_a_sequence(stream: bool) -> None:
    last = pb.SequenceOutput(token_ids=[0], finish_reason=STOP, stop_token_id=0)
    *_, complete = taken(answer(stream=stream), last, request_end=RequestEnd())
    assert complete.finish_reason == "stop"
    assert complete.WhichOneof("matched_stop") == "matched_token_id"
    assert complete.matched_token_id == 0
    *_, complete = taken(
        answer(stream=stream), pb.SequenceOutput(token_ids=[2], finish_reason=STOP), request_end=RequestEnd()
    )
    assert complete.WhichOneof("matched_stop") is None


def test_counts_of_speculative_decoding() -> None:
    counts = pb.SpeculativeDecoding(num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4)
    last = pb.SequenceOutput(token_ids=[5], finish_reason=STOP, speculative_decoding=counts)
    *_, complete = taken(answer(stream=True), last, request_end=RequestEnd())
    assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (9, 4)


LOGPROBS = Logprobs(
    logprobs=[-0.1, -math.inf], ranks=[1, 9], top_k=2, top_token_ids=[5, 7, 8, 9], top_logprobs=[-0.1, -2, -0.5, -1]
)


def test_logprobs_of_the_most_likely_tokens() -> None:
    [chunk] = taken(answer(stream=True), pb.SequenceOutput(token_ids=[5, 6], logprobs=LOGPROBS))
    logprobs = chunk.output_logprobs
    # The engine's float32 values as they are.
    assert list(logprobs.token_logprobs) == list(LOGPROBS.logprobs)
    assert list(logprobs.token_ids) == [5, 6]
    assert [(list(top.token_ids), list(top.values)) for top in logprobs.top_logprobs] == [
        ([5, 7], list(LOGPROBS.top_logprobs)[:2]),
        ([8, 9], list(LOGPROBS.top_logprobs)[2:]),
    ]


def test_logprobs_of_the_tokens_alone() -> None:
    logprobs = Logprobs(logprobs=[-0.5], ranks=[2])
    [chunk] = taken(answer(stream=True), pb.SequenceOutput(token_ids=[5], logprobs=logprobs))
    assert chunk.output_logprobs == smg.OutputLogProbs(token_ids=[5], token_logprobs=[-0.5])


PROMPT_LOGPROBS = PromptLogprobs(
    offset=1, logprobs=[-1, -2], ranks=[1, 1], top_k=1, top_token_ids=[8, 9], top_logprobs=[-3, -4]
)
INPUT_LOGPROBS = smg.InputLogProbs(
    token_ids=[1, 2, 3],
    token_logprobs=[{}, {"value": -1}, {"value": -2}],
    top_logprobs=[{}, {"token_ids": [8], "values": [-3]}, {"token_ids": [9], "values": [-4]}],
)


def test_logprobs_of_the_prompt_come_once_for_each_sequence() -> None:
    stream = answer(stream=True, n=2)
    [first] = taken(stream, pb.SequenceOutput(token_ids=[5]), prompt_logprobs=PROMPT_LOGPROBS)
    assert first.input_logprobs == INPUT_LOGPROBS
    again, other = taken(stream, pb.SequenceOutput(token_ids=[5]), pb.SequenceOutput(index=1, token_ids=[6]))
    assert not again.HasField("input_logprobs")
    assert other.input_logprobs == INPUT_LOGPROBS

    last = pb.SequenceOutput(token_ids=[5], finish_reason=STOP)
    [complete] = taken(answer(stream=False), last, request_end=RequestEnd(), prompt_logprobs=PROMPT_LOGPROBS)
    assert complete.input_logprobs == INPUT_LOGPROBS


def test_logprobs_of_the_prompt_tokens_alone() -> None:
    columns = PromptLogprobs(offset=1, logprobs=[-1, -2], ranks=[1, 1])
    [chunk] = taken(answer(stream=True), pb.SequenceOutput(token_ids=[5]), prompt_logprobs=columns)
    assert chunk.input_logprobs == smg.InputLogProbs(
        token_ids=[1, 2, 3], token_logprobs=[{}, {"value": -1}, {"value": -2}]
    )
