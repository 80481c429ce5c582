"""Translates vLLM's exceptions to the server's own."""

import re

import pydantic
from vllm.exceptions import (
    GenerationError,
    MaxQueuedTokensError,
    QueueOverflowError,
    RetryableRequestError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from tokenwire._contract import Reason
from tokenwire.v1 import sampling_params_pb2
from tokenwire_server.errors import RequestError, Violation, engine_dead, invalid_field

_SAMPLING_FIELDS = frozenset(sampling_params_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_FIRST_WORD = re.compile(r"\W*(?:Requested )?(\w+)")
_INPUT_FIELDS = {"data_parallel_rank": "data_parallel_rank", "cache_salt": "cache_salt", "prompt": "prompt_token_ids"}

FAULTS = (
    EngineDeadError,
    GenerationError,
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMClientError,
)
"""The exceptions that `translate` handles. Any other is a bug, in tokenwire or in vLLM."""


def first_line(error: Exception) -> str:
    """Return the first informative line of an exception's text, for one-line messages."""
    # The first line of pydantic's text contains only the number of errors.
    text = error.errors()[0]["msg"] if isinstance(error, pydantic.ValidationError) else str(error)
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__


def translate(error: BaseException, path: str) -> RequestError:
    """Return the server's own exception for one of `FAULTS`; `path` is the path of the GenerationInput."""
    match error:
        case EngineDeadError():
            return engine_dead()
        case QueueOverflowError():
            return RequestError(Reason.QUEUE_FULL, "the engine's queue is full (--max-num-queued-reqs)")
        case MaxQueuedTokensError():
            return RequestError(
                Reason.QUEUED_TOKENS_LIMIT, "the engine has too many prompt tokens queued (--max-num-queued-tokens)"
            )
        case RetryableRequestError():
            return RequestError(Reason.ENGINE_PAUSED, f"the engine is not accepting requests: {error}")
        case GenerationError():
            return RequestError(
                Reason.REQUEST_FAILED, f"the engine ended this request with an error; other requests continue: {error}"
            )
        case VLLMNotFoundError():
            violation = Violation(f"{path}.model", "must name a model or adapter that can be loaded")
            return RequestError(Reason.UNKNOWN_MODEL, str(error), (violation,))
    # The rest of FAULTS are errors in the request.
    message = Exception.__str__(error) or type(error).__name__
    return invalid_field(_field_path(error, message, path), message)


def _field_path(error: BaseException, message: str, path: str) -> str:
    # Only some of vLLM's validation errors name the parameter; the text of the others starts with it.
    named = error.parameter if isinstance(error, VLLMValidationError) else None
    word = named or (match.group(1) if (match := _FIRST_WORD.match(message)) else "")
    if word in _SAMPLING_FIELDS:
        return f"{path}.sampling_params.{word}"
    if word in _INPUT_FIELDS:
        return f"{path}.{_INPUT_FIELDS[word]}"
    return f"{path}.sampling_params" if named is None else path
