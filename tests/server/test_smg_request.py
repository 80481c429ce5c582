"""From VllmEngine's GenerateRequest to our GenerationInput."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto import vllm_engine_pb2 as smg

from tokenwire._contract import Reason
from tokenwire.v1 import sampling_params_pb2 as pb
from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.errors import RequestError, Violation
from tokenwire_server.services.smg.faults import renamed
from tokenwire_server.services.smg.request import fill

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "n": 1,
}
"""What a request without sampling parameters says, of which some have no other way to be left out."""


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    return smg.GenerateRequest(**{"tokenized": {"input_ids": [1, 2, 3]}, "sampling_params": sampling, **fields})


def converted(sampling: dict[str, Any] | None = None, **fields: Any) -> GenerationInput:
    message = GenerationInput()
    fill(message, request(sampling, **fields))
    return message


def test_a_prompt_alone() -> None:
    expected = GenerationInput(prompt_token_ids=[1, 2, 3], sampling_params=pb.SamplingParams(**NEUTRAL))
    assert converted() == expected
    # As the gateway leaves things out.
    unset = {"top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "skip_special_tokens": True}
    assert converted(unset | {"spaces_between_special_tokens": True}) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "chatcmpl-1"},
        {"kv_transfer_params_json": '{"do_remote_prefill": true}'},
        {"data_parallel_rank": 0},
        {"data_parallel_rank": 3},
    ],
    ids=str,
)
def test_a_field_of_the_same_name(fields: dict[str, Any]) -> None:
    assert converted(**fields) == GenerationInput(
        prompt_token_ids=[1, 2, 3], sampling_params=pb.SamplingParams(**NEUTRAL), **fields
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.75},
        {"top_p": 0.5},
        {"top_k": 20},
        {"min_p": 0.25},
        {"frequency_penalty": -0.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.25},
        {"max_tokens": 0},
        {"max_tokens": 16},
        {"min_tokens": 4},
        {"stop_token_ids": [7, 2]},
        {"ignore_eos": True},
        {"n": 3},
        {"logprobs": 0},
        {"logprobs": -1},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 5},
        {"seed": 0},
        {"seed": -1},
        {"logit_bias": {5: -1.5, 0: 100.0}},
    ],
    ids=str,
)
def test_a_sampling_parameter_of_the_same_name(fields: dict[str, Any]) -> None:
    assert converted(fields).sampling_params == pb.SamplingParams(**NEUTRAL | fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json_schema": "{}"}, {"json": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"json_object": True}, {"json_object": {}}),
        ({"choice": {"choices": ["yes", "no"]}}, {"choice": {"choices": ["yes", "no"]}}),
        ({"choice": {}}, {"choice": {}}),
        # Refused later, since there is none: not dropped.
        ({"regex": ""}, {"regex": ""}),
        ({"json_object": False}, None),
    ],
    ids=str,
)
def test_a_constraint(fields: dict[str, Any], expected: Any) -> None:
    assert converted(fields).sampling_params == pb.SamplingParams(**NEUTRAL, structured_outputs=expected)


def test_a_grammar_from_the_first_token() -> None:
    message = converted({"regex": "a", "grammar_from_first_token": True})
    assert message.reasoning_ended
    assert not converted({"regex": "a"}).HasField("reasoning_ended")


@pytest.mark.parametrize(
    ("sent", "reason", "field"),
    [
        (smg.GenerateRequest(text="hello"), Reason.UNSUPPORTED_FIELD, "text"),
        (smg.GenerateRequest(), Reason.INVALID_FIELD, "tokenized"),
        (request(mm_inputs={}), Reason.UNSUPPORTED_FIELD, "mm_inputs"),
        (request(extra_mm_inputs=[{}]), Reason.UNSUPPORTED_FIELD, "extra_mm_inputs"),
        (request(media_refs={}), Reason.UNSUPPORTED_FIELD, "media_refs"),
        (request(kv_transfer_params={"remote_host": "a"}), Reason.UNSUPPORTED_FIELD, "kv_transfer_params"),
        (request(data_parallel_rank=-1), Reason.INVALID_FIELD, "data_parallel_rank"),
        (
            request({"truncate_prompt_tokens": 4}),
            Reason.UNSUPPORTED_FIELD,
            "sampling_params.truncate_prompt_tokens",
        ),
        (request({"logit_bias": {-1: 1.0}}), Reason.INVALID_FIELD, "sampling_params.logit_bias[-1]"),
        # As large as VllmEngine's type allows, which ours does not.
        (request({"top_k": 2**32 - 1}), Reason.INVALID_FIELD, "sampling_params.top_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_the_field(sent: Any, reason: Reason, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        fill(GenerationInput(), sent)
    assert caught.value.reason == reason
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.message.startswith(f"{field}: ")


def test_what_another_engine_computed_is_known_where_the_rest_is_refused() -> None:
    message = GenerationInput()
    with pytest.raises(RequestError):
        fill(message, request({"truncate_prompt_tokens": 4}, kv_transfer_params_json="{}", data_parallel_rank=1))
    assert message.kv_transfer_params_json == "{}"
    assert message.data_parallel_rank == 1


def without_effect(kind: Any, convert: Callable[[dict[str, Any]], GenerationInput]) -> set[str]:
    """Return the fields that are neither refused nor change the result."""
    found = set()
    for descriptor in kind.DESCRIPTOR.fields:
        try:
            result = convert({descriptor.name: example(descriptor)})
        except RequestError:
            continue
        if result == converted():
            found.add(descriptor.name)
    return found


def test_no_field_is_dropped() -> None:
    # Whether outputs come as they are made is no part of a GenerationInput; the example of the second is empty.
    assert without_effect(smg.GenerateRequest, lambda fields: converted(**fields)) == {"stream", "sampling_params"}
    # About text.
    assert without_effect(smg.SamplingParams, converted) == {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "stop",
    }


def example(descriptor: FieldDescriptor) -> Any:
    """Return a value of a field that is not its default."""
    if descriptor.name == "logit_bias":
        return {3: 1.0}
    if descriptor.name == "tokenized":
        return {"input_ids": [9]}
    value: Any = {
        FieldDescriptor.CPPTYPE_STRING: "a",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_MESSAGE: {},
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    }.get(descriptor.cpp_type, 5)
    return [value] if descriptor.is_repeated else value


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("input.prompt_token_ids[3]", "tokenized.input_ids[3]"),
        ("input.request_id", "request_id"),
        ("input.sampling_params.top_p", "sampling_params.top_p"),
        ("input.sampling_params.structured_outputs", "sampling_params.constraint"),
        ("input.sampling_params.structured_outputs.json", "sampling_params.json_schema"),
        ("input.sampling_params.structured_outputs.json_object", "sampling_params.json_object"),
        ("input.sampling_params.structured_outputs.choice.choices", "sampling_params.choice.choices"),
        ("input.reasoning_ended", "sampling_params.grammar_from_first_token"),
        ("input", "input"),
    ],
)
def test_a_field_is_named_as_it_was_sent(ours: str, theirs: str) -> None:
    with pytest.raises(RequestError) as caught, renamed():
        raise RequestError(Reason.INVALID_FIELD, f"{ours}: is wrong", (Violation(ours, "is wrong"),))
    assert caught.value.reason == Reason.INVALID_FIELD
    assert caught.value.message == f"{theirs}: is wrong"
    assert caught.value.violations == (Violation(theirs, "is wrong"),)


def test_a_message_without_a_field_stays() -> None:
    with pytest.raises(RequestError, match=r"^the engine's input\. queue is full$"), renamed():
        raise RequestError(Reason.QUEUE_FULL, "the engine's input. queue is full")
