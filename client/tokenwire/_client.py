"""The asyncio client."""

# A timeout here is the gRPC deadline, which the server sees too; asyncio.timeout would not do.
# ruff: noqa: ASYNC109

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from tokenwire import _health, _wire
from tokenwire._abort import AbortResult
from tokenwire._channel import DEFAULT_TARGET
from tokenwire._connection import ClientOptions, Connection, Metadata
from tokenwire._engine_info import EngineInfo
from tokenwire._engine_load import EngineLoad
from tokenwire._health import AsyncHealthWatch, HealthStatus
from tokenwire._input import GenerationOptions, generation_input
from tokenwire._multiplex.step_view import MultiplexSteps
from tokenwire._multiplex.typed_view import DEFAULT_MAX_BUFFERED_TOKENS, Multiplex
from tokenwire._results import GenerateResult
from tokenwire._sampling_params import SamplingParams
from tokenwire._status import malformed
from tokenwire._stream import AsyncDeltaStream
from tokenwire.v1 import engine_service_pb2 as pb

# Loading a large model takes minutes.
DEFAULT_WAIT_READY_TIMEOUT = 300.0


class AsyncClient:
    """A client of one tokenwire server: token ids in, token ids out.

        async with tokenwire.AsyncClient("127.0.0.1:50051") as client:
            result = await client.generate([1, 2, 3], tokenwire.SamplingParams(max_tokens=16))
            print(result.token_ids)

    `target` is host:port or grpc://host:port, a gRPC name such as dns:///host:port, or unix:/path for a Unix domain
    socket; a host without a port has port 50051. Another form raises ValueError. The keyword arguments are those of
    `ClientOptions`. The client connects with its first call, in that call's event loop, and works only there:
    `asyncio.run` makes a new one each time. HTTP proxies of the environment are not used unless `enable_http_proxy` is
    set. The client cannot be used in a forked child process, and neither can gRPC: start processes with spawn, or
    fork before creating the first client. Without `async with`, call `close()` when done.

    Every call takes `timeout`, its gRPC deadline in seconds: when it passes, the server aborts the request and the call
    raises DeadlineExceededError. None: no deadline. Every call takes `metadata`, which is sent after the client's own.

    Every call may raise UnreachableError (within `connect_timeout` if no server answers), ClientClosedError, and
    StatusError for a status other than OK; `tokenwire._errors` shows the class tree. Cancelling the task that awaits a
    call cancels the call, and the server aborts the request.

    Nothing is retried. An error's `retry_here` and `retry_elsewhere` report whether the same request may be sent again,
    to this server or to another one.
    """

    def __init__(self, target: str = DEFAULT_TARGET, **options: Unpack[ClientOptions]) -> None:
        self._connection = Connection(target, **options)

    @property
    def target(self) -> str:
        """The server's address, as passed to the constructor."""
        return self._connection.target

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerateResult:
        """Generate tokens for a prompt and return when all sequences have finished.

        Args:
            prompt_token_ids: token ids of the prompt, at least one, each in the model's vocabulary.
            sampling_params: how to sample. None: the model's defaults.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.
            **options: fields of `GenerationOptions`, `request_id` and `max_time` for example.

        Returns:
            All sequences by index, with usage and timing. An aborted request returns the tokens generated so far, with
            the finish reason ABORT.

        Raises:
            InvalidArgumentError: a value is invalid; raised before the call for values that cannot be encoded.
            DeadlineExceededError: `timeout` passed, and the server aborted the request.
            UnreachableError: the server could not be reached, or the connection broke.
            ClientClosedError: the client is closed.
            StatusError: the server refused the request, or it failed.

        """
        request = pb.GenerateRequest(input=generation_input(prompt_token_ids, sampling_params, **options))
        response = await self._connection.unary(self._connection.stub.Generate, request, timeout, metadata)
        try:
            return GenerateResult.from_proto(response)
        except ValueError as error:
            raise malformed(error) from None

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncDeltaStream:
        """Generate tokens for a prompt and return them as they arrive.

            async with client.stream(prompt, params) as deltas:
                async for delta in deltas:
                    ...

        The request starts at once. Leaving the block or the loop aborts it on the server; `AsyncDeltaStream` describes
        what is guaranteed.

        Args:
            prompt_token_ids: token ids of the prompt, at least one, each in the model's vocabulary.
            sampling_params: how to sample. None: the model's defaults.
            timeout: the call's gRPC deadline, in seconds, for the stream as a whole. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.
            **options: fields of `GenerationOptions`, `request_id` and `max_time` for example.

        Returns:
            The stream of deltas. The first read raises what the server refuses.

        Raises:
            InvalidArgumentError: a value cannot be encoded.
            ClientClosedError: the client is closed.

        """
        message = generation_input(prompt_token_ids, sampling_params, **options)
        return AsyncDeltaStream(self._connection, message, timeout, metadata)

    def multiplex(
        self,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        max_buffered_tokens: int = DEFAULT_MAX_BUFFERED_TOKENS,
    ) -> Multiplex:
        """Send many requests on one gRPC stream and read each as a typed stream, for much less CPU than separate calls.

            async with client.multiplex() as mux:
                streams = [mux.submit(prompt, params) for prompt in prompts]
                results = [await stream.result() for stream in streams]

        Args:
            timeout: gRPC deadline of the whole stream, in seconds. None: no deadline. A single request has `max_time`.
            metadata: metadata of the stream, sent after the client's own. None: nothing is added.
            max_buffered_tokens: number of unread tokens, of all requests together, above which no more messages are
                read from the connection while no reader waits; see `Multiplex`. Default: 262,144.

        Returns:
            The stream, which `async with` opens.

        Raises:
            InvalidArgumentError: `max_buffered_tokens` is below 1.

        """
        return Multiplex(self._connection, timeout, metadata, max_buffered_tokens)

    def multiplex_steps(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> MultiplexSteps:
        """Send many requests on one gRPC stream and read the output of all of them step by step, in columns.

            async with client.multiplex_steps() as steps:
                handles = [steps.submit(prompt, params) for prompt in prompts]
                steps.done_submitting()
                async for step in steps:
                    for handle, index, token_ids, logprobs in step.runs():
                        ...

        For coordinators that do not want a task per request; see `MultiplexSteps`.

        Args:
            timeout: gRPC deadline of the whole stream, in seconds; None: no deadline.
            metadata: sent after the client's own; None: nothing is added.

        Returns:
            The stream, to be entered with `async with`.

        """
        return MultiplexSteps(self._connection, timeout, metadata)

    async def abort(
        self,
        request_ids: Sequence[str],
        *,
        remember_unknown_for: float | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> list[AbortResult]:
        """Abort requests by id, from any connection, and return when the engine has aborted them. Safe to repeat.

        Args:
            request_ids: the requests' ids, 1 to 10,000. An empty list is an error, never "all".
            remember_unknown_for: seconds, above 0 and up to 3,600, for which unknown ids are remembered: a request with
                such an id that arrives later ends with ABORT immediately. None: unknown ids are not remembered.
            timeout: the call's gRPC deadline, in seconds. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.

        Returns:
            One result per id, in the order given.

        Raises:
            InvalidArgumentError: the list of ids is empty or too long, or a value is invalid.
            TokenwireError: the call failed in another way; see the class.

        """
        values = {
            "request_ids": _wire.sequence("request_ids", request_ids),
            "remember_unknown_for": _wire.duration("remember_unknown_for", remember_unknown_for),
        }
        request = _wire.build(pb.AbortRequest, "", values)
        response = await self._connection.unary(self._connection.stub.Abort, request, timeout, metadata)
        return [AbortResult.from_proto(result) for result in response.results]

    async def engine_info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineInfo:
        """Return the engine's model, limits, features and versions."""
        method = self._connection.stub.GetEngineInfo
        response = await self._connection.unary(method, pb.GetEngineInfoRequest(), timeout, metadata)
        return EngineInfo.from_proto(response.info)

    async def engine_load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineLoad:
        """Return the engine's load. Cheap: the server answers without the engine, so routers may poll every second."""
        response = await self._connection.unary(self._connection.stub.GetLoad, pb.GetLoadRequest(), timeout, metadata)
        return EngineLoad.from_proto(response.load)

    async def health(
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
            TokenwireError: the call failed; see the class.

        """
        return await _health.health(self._connection, service, timeout, metadata)

    def watch_health(
        self, service: str = "", *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> AsyncHealthWatch:
        """Watch a service's health status: the present one comes first, then each change; see `AsyncHealthWatch`.

        Args:
            service: full name of the gRPC service. "": the server as a whole.
            timeout: the call's gRPC deadline, in seconds, for the watch as a whole. None: no deadline.
            metadata: metadata of this call, sent after the client's own. None: nothing is added.

        Returns:
            The statuses. A read raises the error that ends the watch, UnreachableError if the connection breaks.

        Raises:
            ClientClosedError: the client is closed.

        """
        return AsyncHealthWatch(self._connection, service, timeout, metadata)

    async def wait_ready(
        self,
        *,
        timeout: float | None = DEFAULT_WAIT_READY_TIMEOUT,
        service: str = "",
        metadata: Metadata | None = None,
    ) -> None:
        """Wait until the server accepts requests, even if it is not listening yet, is loading the model or restarts.

        Args:
            timeout: maximum number of seconds to wait. Default: 300. None: no limit.
            service: full name of the gRPC service to wait for. "": the server as a whole.
            metadata: metadata of each attempt, sent after the client's own. None: nothing is added.

        Raises:
            DeadlineExceededError: the server was not ready in time; the message has the last status or error.
            TokenwireError: a call failed for a reason that waiting does not cure, a wrong token for example.

        """
        await _health.wait_ready(self._connection, service, timeout, metadata)

    async def close(self) -> None:
        """Close the connection. Calls in flight are cancelled and raise ClientClosedError. Safe to call again."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
