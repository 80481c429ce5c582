import math
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from tokenwire import InvalidArgumentError, SamplingParams
from tokenwire._input import generation_input

OPTIONS: dict[str, Any] = {
    "request_id": "r-1",
    "model": "adapter",
    "priority": -5,
    "cache_salt": "salt",
    "data_parallel_rank": 0,
    "session_id": "s",
    "max_time": 1.5,
    "trace_headers": {"traceparent": "00-1"},
    "kv_transfer_params_json": '{"port": 5600}',
    "ec_transfer_params_json": "{}",
    "kv_hints_json": '{"x": 1}',
    "reasoning_ended": False,
    "reasoning_parser_kwargs_json": '{"y": 2}',
    "return_prompt_token_ids": True,
}


def test_every_option_reaches_the_wire() -> None:
    message = generation_input([5, 6], SamplingParams(n=1), **OPTIONS)
    sent = MessageToDict(message, preserving_proto_field_name=True)
    assert sent == OPTIONS | {
        "prompt_token_ids": [5, 6],
        "sampling_params": {"n": 1},
        "priority": "-5",
        "max_time": "1.500s",
    }


def test_what_is_not_given_is_not_set() -> None:
    message = generation_input(range(3), **dict.fromkeys(OPTIONS))
    assert {field.name for field, _ in message.ListFields()} == {"request_id", "prompt_token_ids"}


def test_each_request_gets_an_id_of_its_own() -> None:
    ids = {generation_input([1]).request_id for _ in range(3)}
    assert len(ids) == 3
    assert all(request_id.isalnum() for request_id in ids)


@pytest.mark.parametrize(
    ("seconds", "whole", "nanos"),
    [
        (0.25, 0, 250_000_000),
        (3, 3, 0),
        (-1.5, -1, -500_000_000),
        (1.9999999999, 2, 0),
        (1e9 + 0.5, 10**9, 500_000_000),
    ],
)
def test_max_time_is_exact(seconds: float, whole: int, nanos: int) -> None:
    max_time = generation_input([1], max_time=seconds).max_time
    assert (max_time.seconds, max_time.nanos) == (whole, nanos)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([1, -1], {}, "input.prompt_token_ids[1]"),
        ([2**32], {}, "input.prompt_token_ids[0]"),
        ([1.0], {}, "input.prompt_token_ids[0]"),
        ("text", {}, "input.prompt_token_ids"),
        (b"bytes", {}, "input.prompt_token_ids"),
        ([1], {"request_id": ""}, "input.request_id"),
        ([1], {"request_id": 7}, "input.request_id"),
        ([1], {"priority": 2**63}, "input.priority"),
        ([1], {"data_parallel_rank": -1}, "input.data_parallel_rank"),
        ([1], {"max_time": math.nan}, "input.max_time"),
        ([1], {"max_time": math.inf}, "input.max_time"),
        ([1], {"max_time": "soon"}, "input.max_time"),
        ([1], {"trace_headers": {"a": 1}}, "input.trace_headers"),
    ],
)
def test_what_the_wire_cannot_hold_is_refused_by_field(prompt: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        generation_input(prompt, **options)
    assert [violation.field for violation in caught.value.field_violations] == [field]


def test_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'max_tokens'"):
        generation_input([1], max_tokens=3)  # type: ignore[call-arg]
