"""What carries a request to the engine: a call of its own, or a multiplex."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, Self, Unpack

from tokenwire._client import AsyncClient
from tokenwire._input import GenerationOptions
from tokenwire._multiplex.typed_view import Multiplex
from tokenwire._results import Delta, GenerateResult
from tokenwire._sampling_params import SamplingParams


class TokenStream(Protocol):
    """A request's deltas."""

    request_id: str

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None:
        """End the request, if it still runs. May be called again."""


class Started(NamedTuple):
    """A request that runs."""

    deltas: TokenStream
    """What it gives."""
    abort: Callable[[], Awaitable[object]]
    """Aborts it: the deltas then end with ABORT, after those so far."""


class Carrier(Protocol):
    """Brings requests to an engine. `TextClient` has one for a client and one for a multiplex."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, /, **options: Unpack[GenerationOptions]
    ) -> GenerateResult:
        """Give the whole answer to a request."""

    def start(self, prompt: list[int], params: SamplingParams, /, **options: Unpack[GenerationOptions]) -> Started:
        """Start a request."""


class CallCarrier:
    """A call for each request."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def generate(
        self, prompt: list[int], params: SamplingParams, /, **options: Unpack[GenerationOptions]
    ) -> GenerateResult:
        """Give the whole answer to a request."""
        return await self._client.generate(prompt, params, **options)

    def start(self, prompt: list[int], params: SamplingParams, /, **options: Unpack[GenerationOptions]) -> Started:
        """Start a request."""
        deltas = self._client.stream(prompt, params, **options)
        return Started(deltas, lambda: self._client.abort([deltas.request_id]))


class MultiplexCarrier:
    """One stream for all requests."""

    def __init__(self, multiplex: Multiplex) -> None:
        self._multiplex = multiplex

    async def generate(
        self, prompt: list[int], params: SamplingParams, /, **options: Unpack[GenerationOptions]
    ) -> GenerateResult:
        """Give the whole answer to a request."""
        return await self._multiplex.submit(prompt, params, **options).result()

    def start(self, prompt: list[int], params: SamplingParams, /, **options: Unpack[GenerationOptions]) -> Started:
        """Start a request."""
        deltas = self._multiplex.submit(prompt, params, **options)

        async def abort() -> None:
            deltas.abort()

        return Started(deltas, abort)


def carrier_of(engine: AsyncClient | Multiplex | Carrier) -> Carrier:
    """Give the carrier of a client or of a multiplex."""
    if isinstance(engine, AsyncClient):
        return CallCarrier(engine)
    if isinstance(engine, Multiplex):
        return MultiplexCarrier(engine)
    return engine
