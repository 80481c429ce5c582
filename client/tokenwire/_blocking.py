"""The blocking client: AsyncClient, run in a background thread."""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from tokenwire._abort import AbortResult
from tokenwire._blocking_streams import DeltaStream, HealthWatch
from tokenwire._channel import DEFAULT_TARGET
from tokenwire._client import DEFAULT_WAIT_READY_TIMEOUT, AsyncClient
from tokenwire._connection import ClientOptions, Metadata
from tokenwire._engine_info import EngineInfo
from tokenwire._engine_load import EngineLoad
from tokenwire._health import AsyncHealthWatch, HealthStatus
from tokenwire._input import GenerationOptions
from tokenwire._loop_thread import LoopThread
from tokenwire._results import GenerateResult
from tokenwire._sampling_params import SamplingParams
from tokenwire._stream import AsyncDeltaStream


class Client:
    """A client of one tokenwire server, for code without an event loop.

        with tokenwire.Client("127.0.0.1:50051") as client:
            result = client.generate([1, 2, 3], tokenwire.SamplingParams(max_tokens=16))

    Arguments, results and errors are those of `AsyncClient`, which does the work in a background thread. One client may
    be used from any number of threads. It cannot be used in a forked child process, and neither can gRPC: start
    processes with spawn, or fork before creating the first client. Do not use it inside an event loop, which it would
    block: use `AsyncClient` there.

    Ctrl-C during a call cancels the call, and the server aborts the request.

    `multiplex` and `multiplex_steps` are only on `AsyncClient`: their callers wait for many requests at once.
    """

    def __init__(self, target: str = DEFAULT_TARGET, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncClient(target, **options)
        self._thread = LoopThread()
        # Also runs when the client is garbage-collected and at interpreter exit.
        self._finalizer = weakref.finalize(self, _stop, self._thread, self._client)

    @property
    def target(self) -> str:
        """The server's address, as passed to the constructor."""
        return self._client.target

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerateResult:
        """Generate tokens for a prompt and return when all sequences have finished; see `AsyncClient.generate`.

        Args:
            prompt_token_ids: token ids of the prompt, at least one, each in the model's vocabulary.
            sampling_params: how to sample. None: the model's defaults.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.
            **options: fields of `GenerationOptions`.

        Returns:
            All sequences, with usage and timing.

        Raises:
            InvalidArgumentError: a value is invalid or cannot be encoded.
            TokenwireError: the call failed in another way; see `AsyncClient`.

        """
        call = self._client.generate(prompt_token_ids, sampling_params, timeout=timeout, metadata=metadata, **options)
        return self._thread.run(call)

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[GenerationOptions],
    ) -> DeltaStream:
        """Generate tokens for a prompt and return them as they arrive; see `AsyncClient.stream`.

        Args:
            prompt_token_ids: token ids of the prompt, at least one, each in the model's vocabulary.
            sampling_params: how to sample. None: the model's defaults.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.
            **options: fields of `GenerationOptions`.

        Returns:
            The stream of deltas of a request that has been started. The first read raises what the server refuses.

        Raises:
            InvalidArgumentError: a value cannot be encoded.
            ClientClosedError: the client is closed.

        """

        async def start() -> AsyncDeltaStream:
            return self._client.stream(prompt_token_ids, sampling_params, timeout=timeout, metadata=metadata, **options)

        return DeltaStream(self._thread, self._thread.run(start()))

    def abort(
        self,
        request_ids: Sequence[str],
        *,
        remember_unknown_for: float | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> list[AbortResult]:
        """Abort requests by id and return when the engine has aborted them; see `AsyncClient.abort`.

        Args:
            request_ids: the requests' ids, 1 to 10,000.
            remember_unknown_for: seconds, above 0 and up to 3,600, for which unknown ids are remembered: a request with
                such an id that arrives later ends with ABORT immediately. None: unknown ids are not remembered.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.

        Returns:
            One result per id, in the order given.

        Raises:
            InvalidArgumentError: the list of ids is empty or too long, or a value is invalid.
            TokenwireError: the call failed in another way; see `AsyncClient`.

        """
        call = self._client.abort(
            request_ids, remember_unknown_for=remember_unknown_for, timeout=timeout, metadata=metadata
        )
        return self._thread.run(call)

    def engine_info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineInfo:
        """Return the engine's model, limits, features and versions."""
        return self._thread.run(self._client.engine_info(timeout=timeout, metadata=metadata))

    def engine_load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineLoad:
        """Return the engine's load; see `AsyncClient.engine_load`."""
        return self._thread.run(self._client.engine_load(timeout=timeout, metadata=metadata))

    def health(
        self, service: str = "", *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> HealthStatus:
        """Return a service's health status.

        Args:
            service: full name of the gRPC service. "": the server as a whole.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.

        Returns:
            The status; SERVICE_UNKNOWN if the server has no such service.

        Raises:
            TokenwireError: the call failed; see `AsyncClient`.

        """
        return self._thread.run(self._client.health(service, timeout=timeout, metadata=metadata))

    def watch_health(
        self, service: str = "", *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> HealthWatch:
        """Watch a service's health status: the present one, then each change; see `AsyncClient.watch_health`.

        Args:
            service: full name of the gRPC service. "": the server as a whole.
            timeout: the call's gRPC deadline, in seconds, for the watch as a whole. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.

        Returns:
            The statuses. A read waits for the next change.

        Raises:
            ClientClosedError: the client is closed.

        """

        async def start() -> AsyncHealthWatch:
            return self._client.watch_health(service, timeout=timeout, metadata=metadata)

        return HealthWatch(self._thread, self._thread.run(start()))

    def wait_ready(
        self,
        *,
        timeout: float | None = DEFAULT_WAIT_READY_TIMEOUT,
        service: str = "",
        metadata: Metadata | None = None,
    ) -> None:
        """Wait until the server accepts requests; see `AsyncClient.wait_ready`.

        Args:
            timeout: maximum number of seconds to wait. Default: 300. None: no limit.
            service: full name of the gRPC service to wait for. "": the server as a whole.
            metadata: metadata of each attempt, sent after the client's own. None: nothing is added.

        Raises:
            DeadlineExceededError: the server was not ready in time; the message has the last status or error.
            TokenwireError: a call failed for a reason that waiting does not cure, a wrong token for example.

        """
        self._thread.run(self._client.wait_ready(timeout=timeout, service=service, metadata=metadata))

    def close(self) -> None:
        """Close the connection; calls in other threads raise ClientClosedError. Safe to call again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _stop(thread: LoopThread, client: AsyncClient) -> None:
    thread.stop(client.close())
