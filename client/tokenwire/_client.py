"""The client."""

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
from tokenwire._health import HealthStatus
from tokenwire._input import GenerationOptions, generation_input
from tokenwire._multiplex.step_view import MultiplexSteps
from tokenwire._multiplex.typed_view import DEFAULT_MAX_BUFFERED_TOKENS, Multiplex
from tokenwire._results import GenerateResult
from tokenwire._sampling_params import SamplingParams
from tokenwire._stream import AsyncDeltaStream
from tokenwire.v1 import engine_service_pb2 as pb

DEFAULT_WAIT_READY_TIMEOUT = 300.0


class AsyncClient:
    """A remote engine: token ids in, token ids out.

        async with tokenwire.AsyncClient("127.0.0.1:50051") as client:
            result = await client.generate([1, 2, 3], tokenwire.SamplingParams(max_tokens=16))
            print(result.token_ids)

    `target` is host:port, a gRPC name like dns:///host:port, or unix:/path for a socket. The options are those of
    `ClientOptions`. The connection is made by the first call, in that call's event loop, where the client stays; it
    does not survive a fork, nor does gRPC itself:
    start other processes by spawn, or fork before the first client. Without `async with`, call `close()` at the end.

    Every call takes `timeout`, in seconds: the gRPC deadline, after which the server has let go of the request and
    DeadlineExceededError is raised. None: no deadline. It takes `metadata`, which follows the client's own. And it
    raises UnreachableError (within `connect_timeout`, where nobody answers), ClientClosedError, or StatusError; see
    `tokenwire._errors` for the tree. Cancelling the task that waits cancels the call on the server.

    Nothing is retried: `is_retry_safe` of the error says whether the same request may be sent again.
    """

    def __init__(self, target: str = DEFAULT_TARGET, **options: Unpack[ClientOptions]) -> None:
        self._connection = Connection(target, **options)

    @property
    def target(self) -> str:
        """The server's address, as given."""
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
        """Continue a prompt and return when all sequences have ended.

        A request that is aborted returns what it had, with the finish reason ABORT. sampling_params None means the
        model's defaults; the options are those of `GenerationOptions`. Raises InvalidArgumentError, also before the
        call, for values that cannot be sent.
        """
        request = pb.GenerateRequest(input=generation_input(prompt_token_ids, sampling_params, **options))
        response = await self._connection.unary(self._connection.stub.Generate, request, timeout, metadata)
        return GenerateResult.from_proto(response)

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncDeltaStream:
        """Continue a prompt and give the new tokens as they come.

            async with client.stream(prompt, params) as deltas:
                async for delta in deltas:
                    ...

        Starts the request at once. Leaving the block, or the loop, cancels it on the server; see `AsyncDeltaStream`
        for what is guaranteed. The arguments are those of `generate`. What the server refuses is raised by the first
        read.
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
        """Carry many requests on one stream, at a fraction of the cost of as many calls.

            async with client.multiplex() as mux:
                streams = [mux.submit(prompt, params) for prompt in prompts]
                results = [await stream.result() for stream in streams]

        See `Multiplex`, also for what `max_buffered_tokens` (default: 262,144) bounds. `timeout` and `metadata` are the
        whole stream's; a single request has `max_time`.
        """
        return Multiplex(self._connection, timeout, metadata, max_buffered_tokens)

    def multiplex_steps(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> MultiplexSteps:
        """Carry many requests on one stream and tell what they get step by step, in columns.

            async with client.multiplex_steps() as steps:
                handles = [steps.submit(prompt, params) for prompt in prompts]
                steps.done_submitting()
                async for step in steps:
                    for handle, index, token_ids, logprobs in step.runs():
                        ...

        For coordinators that want no task for each request; see `MultiplexSteps`.
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
        """Abort requests by their ids, from any connection, and return when the engine has let go of them.

        There is one result for each id, in the order given. Safe to repeat; an empty list is an error, never "all".
        With `remember_unknown_for`, seconds up to an hour, a request with an id that is not known yet ends at once when
        it arrives in that time.
        """
        _wire.not_text("request_ids", request_ids)
        values = {
            "request_ids": request_ids,
            "remember_unknown_for": _wire.duration("remember_unknown_for", remember_unknown_for),
        }
        request = _wire.build(pb.AbortRequest, "", values)
        response = await self._connection.unary(self._connection.stub.Abort, request, timeout, metadata)
        return [AbortResult.from_proto(result) for result in response.results]

    async def engine_info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineInfo:
        """Ask what the engine is and can do."""
        method = self._connection.stub.GetEngineInfo
        response = await self._connection.unary(method, pb.GetEngineInfoRequest(), timeout, metadata)
        return EngineInfo.from_proto(response.info)

    async def engine_load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> EngineLoad:
        """Ask how busy the engine is. Cheap: routers may ask every second."""
        response = await self._connection.unary(self._connection.stub.GetLoad, pb.GetLoadRequest(), timeout, metadata)
        return EngineLoad.from_proto(response.load)

    async def health(
        self, service: str = "", *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> HealthStatus:
        """Ask for a service's health; "" stands for the whole server."""
        return await _health.health(self._connection, service, timeout, metadata)

    async def wait_ready(
        self,
        *,
        timeout: float | None = DEFAULT_WAIT_READY_TIMEOUT,
        service: str = "",
        metadata: Metadata | None = None,
    ) -> None:
        """Wait until the server takes requests, also while it does not listen yet, loads or restarts.

        Raises DeadlineExceededError, which tells the last obstacle, when that takes more than `timeout` seconds.
        Default: 300. None: no limit.
        """
        await _health.wait_ready(self._connection, service, timeout, metadata)

    async def close(self) -> None:
        """Close the connection; calls that run are cancelled and raise ClientClosedError. May be called again."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
