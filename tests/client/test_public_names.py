import subprocess
import sys
from pathlib import Path

import tokenwire
from tokenwire import _version

NAMES = [
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


def test_public_names_are_these() -> None:
    assert sorted(tokenwire.__all__) == sorted(NAMES)
    assert all(hasattr(tokenwire, name) for name in NAMES)


def test_no_public_module_beside_the_stubs() -> None:
    folder = Path(tokenwire.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for name in modules if not name.startswith("_")} == {"text", "v1"}


def test_package_is_typed_and_versioned() -> None:
    assert (Path(tokenwire.__file__).parent / "py.typed").exists()
    assert tokenwire.__version__ == _version.__version__


def test_import_is_light() -> None:
    """FIELD_LOG 17."""
    code = "import sys, tokenwire; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"numpy", "torch", "vllm", "transformers", "typer", "rich", "grpc_status", "tokenwire_server"}
    assert not heavy & set(done.stdout.split())
