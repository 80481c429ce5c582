from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from tokenwire import InvalidArgumentError, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from tokenwire.v1 import sampling_params_pb2 as pb

IDS = {"token_ids": [1, 2]}
# Each field of the contract, as a Python value and on the wire. Zero where zero differs from unset.
FIELDS: dict[str, tuple[Any, Any]] = {
    "n": (3, 3),
    "temperature": (0.7, 0.7),
    "top_p": (0.0, 0.0),
    "top_k": (-1, -1),
    "min_p": (0.25, 0.25),
    "presence_penalty": (-2, -2.0),
    "frequency_penalty": (2.0, 2.0),
    "repetition_penalty": (1.1, 1.1),
    "seed": (-(2**63), str(-(2**63))),
    "max_tokens": (2**32 - 1, 2**32 - 1),
    "min_tokens": (0, 0),
    "stop_token_ids": ((1, 2), [1, 2]),
    "ignore_eos": (False, False),
    "logit_bias": ({5: -1.5}, {"5": -1.5}),
    "logprobs": (0, 0),
    "prompt_logprobs": (-1, -1),
    "logprob_token_ids": (range(1, 3), IDS),
    "prompt_logprob_token_ids": ([[1, 2], []], {"rows": [IDS, {}]}),
    "prompt_logprob_start": (0, 0),
    "allowed_token_ids": ([], {}),
    "bad_words_token_ids": ([[1, 2], (1, 2)], [IDS, IDS]),
    "structured_outputs": (StructuredOutputsParams(regex="a+"), {"regex": "a+"}),
    "stream_interval": (4, 4),
    "skip_reading_prefix_cache": (True, True),
    "thinking_token_budget": (-1, -1),
    "repetition_detection": (RepetitionDetectionParams(min_count=0), {"min_count": 0}),
    "watermarking": (False, False),
    "extra_args_json": ('{"a": 1.0}', '{"a": 1.0}'),
    "routed_experts_prompt_start": (0, 0),
    "trace_decode_token_ids": ([1, 2], IDS),
}


def as_dict(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def test_every_field_is_tested() -> None:
    assert set(FIELDS) == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("name", FIELDS)
def test_field_reaches_the_wire_alone(name: str) -> None:
    given, sent = FIELDS[name]
    assert as_dict(SamplingParams(**{name: given}).to_proto()) == {name: sent}


def test_nothing_set_is_nothing_sent() -> None:
    assert SamplingParams().to_proto().ByteSize() == 0


@pytest.mark.parametrize(
    ("params", "sent"),
    [
        ({"json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"json": {"type": "object"}}, {"json": '{"type":"object"}'}),
        ({"choice": ("yes", "no")}, {"choice": {"choices": ["yes", "no"]}}),
        ({"grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"json_object": True}, {"json_object": {}}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        (
            {
                "json_object": True,
                "disable_any_whitespace": True,
                "disable_additional_properties": False,
                "whitespace_pattern": " ?",
            },
            {
                "json_object": {},
                "disable_any_whitespace": True,
                "disable_additional_properties": False,
                "whitespace_pattern": " ?",
            },
        ),
    ],
)
def test_structured_outputs(params: dict[str, Any], sent: dict[str, Any]) -> None:
    assert as_dict(StructuredOutputsParams(**params).to_proto("input")) == sent


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"n": -1}, "n", "an integer from 0 to 4294967295, not -1"),
        ({"max_tokens": 2**32}, "max_tokens", "not 4294967296"),
        ({"max_tokens": 16.0}, "max_tokens", "not 16.0"),
        ({"top_k": "all"}, "top_k", "an integer from -2147483648"),
        ({"seed": 2**63}, "seed", "9223372036854775807"),
        ({"temperature": "hot"}, "temperature", "a real number, not 'hot'"),
        ({"ignore_eos": "yes"}, "ignore_eos", "True or False"),
        ({"extra_args_json": "\ud800"}, "extra_args_json", "text that UTF-8 can encode"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]", "not -2"),
        ({"stop_token_ids": "12"}, "stop_token_ids", "a sequence"),
        ({"stop_token_ids": 7}, "stop_token_ids", "not 7"),
        ({"logit_bias": {1: 1.0, -3: 0.5}}, "logit_bias", "not {-3: 0.5}"),
        ({"logit_bias": [3]}, "logit_bias", "a mapping"),
        ({"allowed_token_ids": [1, 2.5]}, "allowed_token_ids.token_ids[1]", "not 2.5"),
        ({"bad_words_token_ids": [[1], [-1]]}, "bad_words_token_ids[1].token_ids[0]", "not -1"),
        ({"prompt_logprob_token_ids": [[-1]]}, "prompt_logprob_token_ids.rows[0].token_ids[0]", "not -1"),
        ({"repetition_detection": RepetitionDetectionParams(min_count=-1)}, "repetition_detection.min_count", "-1"),
        ({"structured_outputs": StructuredOutputsParams()}, "structured_outputs", "not none"),
        ({"structured_outputs": StructuredOutputsParams(regex="a", json_object=True)}, "structured_outputs", "regex, "),
        ({"structured_outputs": StructuredOutputsParams(choice="yes")}, "structured_outputs.choice", "a sequence"),
        ({"structured_outputs": StructuredOutputsParams(choice=["a", 1])}, "structured_outputs.choice.choices[1]", "1"),  # type: ignore[list-item]
        ({"structured_outputs": StructuredOutputsParams(json={"a": object()})}, "structured_outputs.json", "JSON"),
        (
            {"structured_outputs": {"regex": "a+"}},
            "structured_outputs",
            "must be StructuredOutputsParams, not {'regex'",
        ),
        ({"repetition_detection": {"min_count": 2}}, "repetition_detection", "must be RepetitionDetectionParams"),
        ({"bad_words_token_ids": 5}, "bad_words_token_ids", "must be a sequence of sequences of token ids, not 5"),
        ({"bad_words_token_ids": [[3], 2]}, "bad_words_token_ids[1]", "must be a sequence of token ids, not 2"),
        ({"bad_words_token_ids": [None]}, "bad_words_token_ids[0]", "must be a sequence of token ids, not None"),
        ({"bad_words_token_ids": "12"}, "bad_words_token_ids", "must be a sequence"),
        ({"bad_words_token_ids": ["12"]}, "bad_words_token_ids[0]", "must be a sequence"),
        ({"bad_words_token_ids": [[1], iter([1, None])]}, "bad_words_token_ids[1].token_ids[1]", "not None"),
        ({"prompt_logprob_token_ids": [1]}, "prompt_logprob_token_ids.rows[0]", "must be a sequence of token ids"),
        ({"prompt_logprob_token_ids": 1}, "prompt_logprob_token_ids.rows", "must be a sequence"),
        ({"allowed_token_ids": 5}, "allowed_token_ids.token_ids", "not 5"),
        ({"stop_token_ids": iter([1, -2])}, "stop_token_ids[1]", "not -2"),
        ({"logprob_token_ids": iter([1, "a"])}, "logprob_token_ids.token_ids[1]", "not 'a'"),
    ],
)
def test_what_the_wire_cannot_hold_is_refused_by_field(params: dict[str, Any], field: str, says: str) -> None:
    """FAULTS D5."""
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**params).to_proto()
    (violation,) = caught.value.field_violations
    assert violation.field == f"input.sampling_params.{field}"
    assert says in violation.description
    assert caught.value.reason == "INVALID_FIELD"
    assert str(caught.value).startswith(f"INVALID_ARGUMENT (INVALID_FIELD): input.sampling_params.{field}: ")


def test_every_field_at_fault_is_named() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(n=-1, temperature=0.5, max_tokens=-1).to_proto()
    fields = [violation.field for violation in caught.value.field_violations]
    assert fields == ["input.sampling_params.n", "input.sampling_params.max_tokens"]


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams(n=1).n = 2  # type: ignore[misc]
