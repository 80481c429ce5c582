"""Builds the GenerationInput of every RPC that starts a request."""

import uuid
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from tokenwire import _wire
from tokenwire._errors import FieldViolation
from tokenwire._sampling_params import SamplingParams
from tokenwire.v1 import generation_pb2 as pb


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `submit`, sent in the request. None: as if it were left out."""

    request_id: str | None
    """The request's id, for `abort` and the engine's logs: 1 to 256 visible ASCII characters, unique
    among the live requests. None: a random id."""
    model: str | None
    """Name of the base model, one of its served names, or a LoRA adapter, in 1 to 1,024 characters. None: the base
    model."""
    priority: int | None
    """Scheduling priority; a lower value is scheduled first. A value other than 0 requires a server with
    --scheduling-policy priority. None: 0."""
    cache_salt: str | None
    """Salt for the keys of the prefix cache, 1 to 128 characters without "@", "/", backslash and NUL: only requests with
    the same salt share prefixes. None: no salt."""
    data_parallel_rank: int | None
    """Data-parallel rank to run the request on. None: the engine balances the load."""
    session_id: str | None
    """Id of the request's session, for engines that route by it, at most 1,024 characters. None: no session."""
    max_time: float | None
    """Maximum number of seconds from arrival, above 0. Then the request ends with TIME_LIMIT and the tokens generated
    so far, where `timeout` raises DeadlineExceededError. None: no limit."""
    trace_headers: Mapping[str, str] | None
    """W3C trace context and other trace headers for the engine, name to value: at most 64, and 8,192 bytes in all. None:
    those in the call's metadata."""
    kv_transfer_params_json: str | None
    """Parameters for the engine's KV connector: a JSON object, passed through unchanged. None: no parameters."""
    ec_transfer_params_json: str | None
    """Parameters for the engine's encoder-cache connector: a JSON object, passed through unchanged. None: no
    parameters."""
    kv_hints_json: str | None
    """Hints for the KV cache: a JSON object in the format of vLLM's kv_hints. None: no hints."""
    reasoning_ended: bool | None
    """Whether the reasoning part has already ended, for structured outputs behind a reasoning parser. None: the engine
    decides from the prompt."""
    reasoning_parser_kwargs_json: str | None
    """Arguments for the engine's reasoning parser: a JSON object. None: no arguments."""
    return_prompt_token_ids: bool | None
    """Whether the result, or the first delta, includes the prompt's token ids. None: False."""


def generation_input(
    prompt_token_ids: Sequence[int],
    sampling_params: SamplingParams | None = None,
    **options: Unpack[GenerationOptions],
) -> pb.GenerationInput:
    """Build the request, with a random id if the caller passes none.

    Args:
        prompt_token_ids: token ids of the prompt.
        sampling_params: how to sample. None: the model's defaults.
        **options: fields of `GenerationOptions`.

    Returns:
        The protobuf message.

    Raises:
        InvalidArgumentError: values cannot be encoded; the field violations name their fields.
        TypeError: `options` has an unknown name.

    """
    unknown = options.keys() - GenerationOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    request_id = options.get("request_id")
    if request_id is None:
        request_id = uuid.uuid4().hex
    elif not request_id:
        # An empty id on the wire asks for a server-generated id, which the caller could not abort by.
        raise _wire.invalid(FieldViolation("input.request_id", "must be 1 to 256 visible ASCII characters, not empty"))
    if sampling_params is not None:
        _wire.check_type("input.sampling_params", sampling_params, SamplingParams)
    values = {
        **options,
        "request_id": request_id,
        "prompt_token_ids": _wire.sequence("input.prompt_token_ids", prompt_token_ids),
        "sampling_params": None if sampling_params is None else sampling_params.to_proto(),
        "max_time": _wire.duration("input.max_time", options.get("max_time")),
    }
    return _wire.build(pb.GenerationInput, "input", values)
