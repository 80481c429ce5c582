"""The client has everything that the contract has, and Client everything that AsyncClient has."""

import inspect
from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor import EnumDescriptor

import tokenwire
from tokenwire._connection import Connection
from tokenwire._input import GenerationOptions, generation_input
from tokenwire.v1 import (
    engine_info_pb2,
    engine_load_pb2,
    engine_service_pb2,
    generation_pb2,
    logprobs_pb2,
    multiplex_pb2,
    sampling_params_pb2,
)

PAIRS = [
    (tokenwire.SamplingParams, sampling_params_pb2.SamplingParams),
    (tokenwire.StructuredOutputsParams, sampling_params_pb2.StructuredOutputsParams),
    (tokenwire.RepetitionDetectionParams, sampling_params_pb2.RepetitionDetectionParams),
    (tokenwire.GenerateResult, engine_service_pb2.GenerateResponse),
    (tokenwire.Delta, engine_service_pb2.GenerateStreamResponse),
    (tokenwire.AbortResult, engine_service_pb2.AbortResult),
    (tokenwire.SequenceOutput, generation_pb2.SequenceOutput),
    (tokenwire.Usage, generation_pb2.Usage),
    (tokenwire.Timing, generation_pb2.Timing),
    (tokenwire.SamplingMask, generation_pb2.SamplingMask),
    (tokenwire.RoutedExperts, generation_pb2.RoutedExperts),
    (tokenwire.WeightVersionSpan, generation_pb2.WeightVersionSpan),
    (tokenwire.SpeculativeDecoding, generation_pb2.SpeculativeDecoding),
    (tokenwire.Logprobs, logprobs_pb2.Logprobs),
    (tokenwire.PromptLogprobs, logprobs_pb2.PromptLogprobs),
    (tokenwire.MultiplexLogprobs, multiplex_pb2.MultiplexLogprobs),
    (tokenwire.MultiplexFinish, multiplex_pb2.MultiplexFinish),
    (tokenwire.MultiplexAccepted, multiplex_pb2.MultiplexAccepted),
    (tokenwire.MultiplexRejection, multiplex_pb2.MultiplexRejection),
    (tokenwire.MultiplexFailure, multiplex_pb2.MultiplexFailure),
    (tokenwire.MultiplexPromptLogprobs, multiplex_pb2.MultiplexPromptLogprobs),
    (tokenwire.EngineInfo, engine_info_pb2.EngineInfo),
    (tokenwire.Adapter, engine_info_pb2.Adapter),
    (tokenwire.Limits, engine_info_pb2.Limits),
    (tokenwire.Parallelism, engine_info_pb2.Parallelism),
    (tokenwire.KvCache, engine_info_pb2.KvCache),
    (tokenwire.EngineLoad, engine_load_pb2.EngineLoad),
    (tokenwire.RankLoad, engine_load_pb2.RankLoad),
]

METHODS = {
    "Generate": "generate",
    "GenerateStream": "stream",
    "Multiplex": "multiplex",
    "Abort": "abort",
    "GetEngineInfo": "engine_info",
    "GetLoad": "engine_load",
}
NOT_BLOCKING = {"multiplex", "multiplex_steps"}


@pytest.mark.parametrize(("ours", "contract"), PAIRS, ids=lambda value: value.__name__)
def test_type_has_every_field_of_its_message(ours: type[msgspec.Struct], contract: Any) -> None:
    assert {field.name for field in msgspec.structs.fields(ours)} == set(contract.DESCRIPTOR.fields_by_name)


def test_step_has_every_field_of_its_message_and_every_event() -> None:
    events = {field.name for field in engine_service_pb2.MultiplexResponse.DESCRIPTOR.oneofs_by_name["event"].fields}
    fields = {field.name for field in msgspec.structs.fields(tokenwire.MultiplexStep)}
    assert fields == set(multiplex_pb2.MultiplexStep.DESCRIPTOR.fields_by_name) | (events - {"step"})


def test_request_takes_every_field_of_the_input() -> None:
    positional = {"prompt_token_ids", "sampling_params"}
    assert set(inspect.signature(generation_input).parameters) == positional | {"options"}
    options = set(GenerationOptions.__annotations__)
    assert options | positional == set(generation_pb2.GenerationInput.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("ours", "contract", "not_ours"),
    [
        (tokenwire.FinishReason, generation_pb2.FinishReason.DESCRIPTOR, {"UNSPECIFIED"}),
        (tokenwire.AbortOutcome, engine_service_pb2.AbortOutcome.DESCRIPTOR, {"UNSPECIFIED"}),
    ],
    ids=["FinishReason", "AbortOutcome"],
)
def test_enum_has_every_value(ours: Any, contract: EnumDescriptor, not_ours: set[str]) -> None:
    prefix = f"{'FINISH_REASON' if contract.name == 'FinishReason' else 'ABORT_OUTCOME'}_"
    values = {value.name.removeprefix(prefix) for value in contract.values}
    assert values - not_ours == {member.name for member in ours} - {"UNKNOWN"}


def test_client_has_every_rpc() -> None:
    rpcs = {method.name for method in engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].methods}
    assert rpcs == set(METHODS)
    for name in METHODS.values():
        assert callable(getattr(tokenwire.AsyncClient, name))


def test_blocking_client_is_the_same_client() -> None:
    def face(client: type) -> dict[str, list[inspect.Parameter]]:
        members = {name: member for name, member in vars(client).items() if not name.startswith("_")}
        return {
            name: list(inspect.signature(member).parameters.values()) if callable(member) else []
            for name, member in members.items()
        }

    expected = {
        name: parameters for name, parameters in face(tokenwire.AsyncClient).items() if name not in NOT_BLOCKING
    }
    assert face(tokenwire.Client) == expected
    assert inspect.signature(tokenwire.Client) == inspect.signature(tokenwire.AsyncClient)


def test_client_options_are_those_that_the_connection_takes() -> None:
    taken = set(inspect.signature(Connection.__init__).parameters) - {"self", "target", "settings"}
    settings = {
        "connect_timeout",
        "keepalive_time",
        "keepalive_timeout",
        "max_receive_message_bytes",
        "max_send_message_bytes",
        "enable_http_proxy",
    }
    assert set(tokenwire.ClientOptions.__annotations__) == taken | settings
