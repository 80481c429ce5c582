"""The blocking client: the same code as AsyncClient, run in a background thread."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

from tokenwire._abort import AbortResult
from tokenwire._channel import DEFAULT_TARGET
from tokenwire._client import DEFAULT_WAIT_READY_TIMEOUT, AsyncClient
from tokenwire._connection import ClientOptions, Metadata
from tokenwire._engine_info import EngineInfo
from tokenwire._engine_load import EngineLoad
from tokenwire._errors import ClientClosedError
from tokenwire._health import HealthStatus
from tokenwire._input import GenerationOptions
from tokenwire._loop_thread import LoopThread
from tokenwire._results import Delta, GenerateResult
from tokenwire._sampling_params import SamplingParams
from tokenwire._stream import AsyncDeltaStream


class DeltaStream(Iterator[Delta]):
    """The deltas of one request, for `for`. Leaving it early ends the request on the server.

    `with` is the form that is guaranteed; a bare `for` that is left early cancels when the stream object is dropped, as
    `AsyncDeltaStream` says. Ctrl-C while it waits cancels too.
    """

    def __init__(self, thread: LoopThread, stream: AsyncDeltaStream) -> None:
        self.request_id = stream.request_id
        """The request's id, for `abort`."""
        self._thread = thread
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """Give the next delta. Raises what `AsyncDeltaStream` raises."""
        delta = self._thread.run(_next(self._stream))
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Cancel the request, if it still runs. May be called again."""
        # Closing the client has cancelled it too.
        with contextlib.suppress(ClientClosedError):
            self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A remote engine, for code without an event loop.

        with tokenwire.Client("127.0.0.1:50051") as client:
            result = client.generate([1, 2, 3], tokenwire.SamplingParams(max_tokens=16))

    Arguments, results and errors are those of `AsyncClient`, which does the work in a background thread. Any number of
    threads may use one client. It does not survive a fork, nor does gRPC itself:
    start other processes by spawn, or fork before the first client. In an event loop use `AsyncClient`;
    this one would stop the loop.

    Ctrl-C while a call waits cancels the call on the server.

    `multiplex` and `multiplex_steps` are AsyncClient's alone: they are for those who wait for many things at once.
    """

    def __init__(self, target: str = DEFAULT_TARGET, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncClient(target, **options)
        self._thread = LoopThread()
        # Also runs when the client is dropped, and before the interpreter ends.
        self._finalizer = weakref.finalize(self, _stop, self._thread, self._client)

    @property
    def target(self) -> str:
        """The server's address, as given."""
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
        """Continue a prompt and return when all sequences have ended; see `AsyncClient.generate`."""
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
        """Continue a prompt and give the new tokens as they come; see `AsyncClient.stream`."""

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
        """Abort requests by their ids and return when the engine has let go of them; see `AsyncClient.abort`."""
        call = self._client.abort(
            request_ids, remember_unknown_for=remember_unknown_for, timeout=timeout, metadata=metadata
        )
        return self._thread.run(call)

    def engine_info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineInfo:
        """Ask what the engine is and can do."""
        return self._thread.run(self._client.engine_info(timeout=timeout, metadata=metadata))

    def engine_load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineLoad:
        """Ask how busy the engine is; see `AsyncClient.engine_load`."""
        return self._thread.run(self._client.engine_load(timeout=timeout, metadata=metadata))

    def health(
        self, service: str = "", *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> HealthStatus:
        """Ask for a service's health; "" stands for the whole server."""
        return self._thread.run(self._client.health(service, timeout=timeout, metadata=metadata))

    def wait_ready(
        self,
        *,
        timeout: float | None = DEFAULT_WAIT_READY_TIMEOUT,
        service: str = "",
        metadata: Metadata | None = None,
    ) -> None:
        """Wait until the server takes requests; see `AsyncClient.wait_ready`."""
        self._thread.run(self._client.wait_ready(timeout=timeout, service=service, metadata=metadata))

    def close(self) -> None:
        """Close the connection; calls that run in other threads raise ClientClosedError. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _next(stream: AsyncDeltaStream) -> Delta | None:
    return await anext(stream, None)


def _stop(thread: LoopThread, client: AsyncClient) -> None:
    thread.stop(client.close())
