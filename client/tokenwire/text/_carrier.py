"""The transports of a text request: separate calls, or a Multiplex stream."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, Self, Unpack, cast

from tokenwire._client import AsyncClient
from tokenwire._errors import FieldViolation
from tokenwire._input import GenerationOptions
from tokenwire._multiplex.typed_view import Multiplex
from tokenwire._results import Delta, GenerateResult
from tokenwire._sampling_params import SamplingParams
from tokenwire._wire import invalid
from tokenwire.text._options import CarrierOptions


class TokenStream(Protocol):
    """The deltas of one request."""

    request_id: str

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None:
        """Abort the request unless it has finished. Safe to call again."""


class Started(NamedTuple):
    """A request that has been started."""

    deltas: TokenStream
    """The request's deltas."""
    abort: Callable[[], Awaitable[object]]
    """Aborts the request. Its deltas end with ABORT."""


class Carrier(Protocol):
    """Sends requests to an engine. `TextClient` makes one from a client or a multiplex."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, /, **options: Unpack[CarrierOptions]
    ) -> GenerateResult:
        """Run a request and return its result.

        Args:
            prompt: token ids of the prompt.
            params: how to sample.
            **options: fields of `CarrierOptions`.

        Returns:
            The result.

        Raises:
            TokenwireError: the request was refused or failed.

        """

    def start(self, prompt: list[int], params: SamplingParams, /, **options: Unpack[CarrierOptions]) -> Started:
        """Start a request.

        Args:
            prompt: token ids of the prompt.
            params: how to sample.
            **options: fields of `CarrierOptions`.

        Returns:
            The request, whose deltas raise what the server refuses.

        Raises:
            TokenwireError: the request cannot be sent.

        """


class CallCarrier:
    """One call per request."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def generate(
        self, prompt: list[int], params: SamplingParams, /, **options: Unpack[CarrierOptions]
    ) -> GenerateResult:
        """Run a request and return its result; see `Carrier.generate`."""
        return await self._client.generate(prompt, params, **options)

    def start(self, prompt: list[int], params: SamplingParams, /, **options: Unpack[CarrierOptions]) -> Started:
        """Start a request; see `Carrier.start`."""
        deltas = self._client.stream(prompt, params, **options)
        metadata = options.get("metadata")
        return Started(deltas, lambda: self._client.abort([deltas.request_id], metadata=metadata))


class MultiplexCarrier:
    """One Multiplex stream for all requests."""

    def __init__(self, multiplex: Multiplex) -> None:
        self._multiplex = multiplex

    async def generate(
        self, prompt: list[int], params: SamplingParams, /, **options: Unpack[CarrierOptions]
    ) -> GenerateResult:
        """Run a request and return its result; see `Carrier.generate`."""
        return await self._multiplex.submit(prompt, params, **_of_request(options)).result()

    def start(self, prompt: list[int], params: SamplingParams, /, **options: Unpack[CarrierOptions]) -> Started:
        """Start a request; see `Carrier.start`."""
        deltas = self._multiplex.submit(prompt, params, **_of_request(options))

        async def abort() -> None:
            deltas.abort()

        return Started(deltas, abort)


def _of_request(options: CarrierOptions) -> GenerationOptions:
    """Return the options of a request. Raises InvalidArgumentError for those that only a call of its own has."""
    for name, instead in (("timeout", "use max_time"), ("metadata", "pass it to multiplex()")):
        if options.get(name) is not None:
            raise invalid(FieldViolation(name, f"cannot be set for one request of a Multiplex stream: {instead}"))
    return cast("GenerationOptions", {n: v for n, v in options.items() if n not in ("timeout", "metadata")})


def carrier_of(engine: AsyncClient | Multiplex | Carrier) -> Carrier:
    """Return the carrier of a client or a multiplex."""
    if isinstance(engine, AsyncClient):
        return CallCarrier(engine)
    if isinstance(engine, Multiplex):
        return MultiplexCarrier(engine)
    return engine
