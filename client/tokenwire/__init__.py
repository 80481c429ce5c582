"""Client of a tokenwire server: token ids in, token ids out, over gRPC.

    import tokenwire

    async with tokenwire.AsyncClient("127.0.0.1:50051") as client:
        await client.wait_ready()
        async with client.stream([1, 2, 3], tokenwire.SamplingParams(max_tokens=16)) as deltas:
            async for delta in deltas:
                print(delta.token_ids)

`Client` is the same for code without an event loop. Every exception of the client is a `TokenwireError`.
"""

from tokenwire._abort import AbortOutcome, AbortResult
from tokenwire._blocking import Client
from tokenwire._blocking_streams import DeltaStream, HealthWatch
from tokenwire._client import AsyncClient
from tokenwire._connection import ClientOptions, Metadata
from tokenwire._contract import CONTRACT_REVISION, Reason
from tokenwire._engine_info import Adapter, EngineInfo, KvCache, Limits, Parallelism
from tokenwire._engine_load import EngineLoad, RankLoad
from tokenwire._errors import (
    AlreadyExistsError,
    CallCancelledError,
    ClientClosedError,
    DeadlineExceededError,
    EngineDeadError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestFailedError,
    ResourceExhaustedError,
    SlowReaderError,
    StatusCode,
    StatusError,
    TokenwireError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnreachableError,
)
from tokenwire._health import AsyncHealthWatch, HealthStatus
from tokenwire._input import GenerationOptions
from tokenwire._logprobs import Logprobs, PromptLogprobs
from tokenwire._multiplex.step import (
    MultiplexAccepted,
    MultiplexFailure,
    MultiplexFinish,
    MultiplexLogprobs,
    MultiplexPromptLogprobs,
    MultiplexRejection,
    MultiplexStep,
)
from tokenwire._multiplex.step_view import MultiplexSteps
from tokenwire._multiplex.stream import MultiplexedStream
from tokenwire._multiplex.typed_view import Multiplex
from tokenwire._results import Delta, GenerateResult, Timing, Usage
from tokenwire._sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from tokenwire._sequence import (
    FinishReason,
    RoutedExperts,
    SamplingMask,
    SequenceOutput,
    SpeculativeDecoding,
    WeightVersionSpan,
)
from tokenwire._stream import AsyncDeltaStream
from tokenwire._version import __version__

__all__ = [
    "CONTRACT_REVISION",
    "AbortOutcome",
    "AbortResult",
    "Adapter",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncDeltaStream",
    "AsyncHealthWatch",
    "CallCancelledError",
    "Client",
    "ClientClosedError",
    "ClientOptions",
    "DeadlineExceededError",
    "Delta",
    "DeltaStream",
    "EngineDeadError",
    "EngineInfo",
    "EngineLoad",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "GenerateResult",
    "GenerationOptions",
    "HealthStatus",
    "HealthWatch",
    "InternalError",
    "InvalidArgumentError",
    "KvCache",
    "Limits",
    "Logprobs",
    "MessageTooLargeError",
    "Metadata",
    "Multiplex",
    "MultiplexAccepted",
    "MultiplexFailure",
    "MultiplexFinish",
    "MultiplexLogprobs",
    "MultiplexPromptLogprobs",
    "MultiplexRejection",
    "MultiplexStep",
    "MultiplexSteps",
    "MultiplexedStream",
    "NotFoundError",
    "OverloadedError",
    "Parallelism",
    "PermissionDeniedError",
    "PromptLogprobs",
    "RankLoad",
    "Reason",
    "RepetitionDetectionParams",
    "RequestFailedError",
    "ResourceExhaustedError",
    "RoutedExperts",
    "SamplingMask",
    "SamplingParams",
    "SequenceOutput",
    "SlowReaderError",
    "SpeculativeDecoding",
    "StatusCode",
    "StatusError",
    "StructuredOutputsParams",
    "Timing",
    "TokenwireError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnreachableError",
    "Usage",
    "WeightVersionSpan",
    "__version__",
]
