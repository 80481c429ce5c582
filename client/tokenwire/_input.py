"""From a caller's arguments to the contract's GenerationInput: for every RPC that starts a request."""

import uuid
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from tokenwire import _wire
from tokenwire._errors import FieldViolation
from tokenwire._sampling_params import SamplingParams
from tokenwire.v1 import generation_pb2 as pb


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of `generate`, `stream` and `submit` that go into the request; None or left out: not set."""

    request_id: str | None
    """Id of the request, for `abort` and for the engine's logs: 1 to 256 visible ASCII characters, unique among the live
    requests. None: a random one."""
    model: str | None
    """The base model's name, one of its served names, or a LoRA adapter. None: the base model."""
    priority: int | None
    """Priority under the engine's priority scheduling: lower runs first. None: 0."""
    cache_salt: str | None
    """Text mixed into the prefix cache's keys, 1 to 1024 characters. None: none."""
    data_parallel_rank: int | None
    """The data-parallel rank that must run the request. None: the engine balances."""
    session_id: str | None
    """Session that the request belongs to, for engines that route by it. None: none."""
    max_time: float | None
    """Most seconds to spend, from arrival; then the request ends with TIME_LIMIT and the tokens so far, where `timeout`
    would end it with DeadlineExceededError and nothing. None: no limit."""
    trace_headers: Mapping[str, str] | None
    """W3C trace context and other trace headers for the engine. None: those of the call's metadata."""
    kv_transfer_params_json: str | None
    """Parameters for the engine's KV connector: a JSON object, passed on verbatim. None: none."""
    ec_transfer_params_json: str | None
    """Parameters for the engine's encoder-cache connector: a JSON object, passed on verbatim. None: none."""
    kv_hints_json: str | None
    """Hints for the KV cache: a JSON object in vLLM's kv_hints form. None: none."""
    reasoning_ended: bool | None
    """Whether the reasoning part of the output has already ended. None: the engine finds out from the prompt."""
    reasoning_parser_kwargs_json: str | None
    """Arguments for the engine's reasoning parser: a JSON object. None: none."""
    return_prompt_token_ids: bool | None
    """Whether the prompt's token ids come back with the first response. None: False."""


def generation_input(
    prompt_token_ids: Sequence[int],
    sampling_params: SamplingParams | None = None,
    **options: Unpack[GenerationOptions],
) -> pb.GenerationInput:
    """Build the request, with a random id where the caller gives none.

    Raises InvalidArgumentError, with the fields at fault, for values that the message cannot hold.
    """
    unknown = options.keys() - GenerationOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    request_id = options.get("request_id")
    if request_id is None:
        request_id = uuid.uuid4().hex
    elif not request_id:
        # On the wire it would mean "make one up", and the caller could not abort by it.
        raise _wire.invalid(FieldViolation("input.request_id", "must be 1 to 256 visible ASCII characters, not empty"))
    _wire.not_text("input.prompt_token_ids", prompt_token_ids)
    values = {
        **options,
        "request_id": request_id,
        "prompt_token_ids": prompt_token_ids,
        "sampling_params": None if sampling_params is None else sampling_params.to_proto(),
        "max_time": _wire.duration("input.max_time", options.get("max_time")),
    }
    return _wire.build(pb.GenerationInput, "input", values)
