"""vLLM's HTTP server with --tokens-only: server-sent events from /inference/v1/generate, with aiohttp and msgspec."""

import asyncio
import time

import aiohttp
import msgspec
from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.measure import Received

_PREFIX = b"data: "
_END = b"[DONE]"


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Message(msgspec.Struct):
    """The fields that are read from an event or a unary response."""

    choices: list[_Choice] = []


class HttpContender(Contender):
    """One call per request, each on its own connection."""

    _session: aiohttp.ClientSession

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Message).decode

    @override
    async def open(self, address: str) -> None:
        self._session = aiohttp.ClientSession(
            f"http://{address}",
            # Below the 5 s of the server, which could otherwise close a connection while it is being reused.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            json_serialize=lambda value: msgspec.json.encode(value).decode(),
            timeout=aiohttp.ClientTimeout(None),
        )

    @override
    async def run(self, case: Case, prompts: list[list[int]], received: Received) -> None:
        await asyncio.gather(*(self._one(case, prompt, number, received) for number, prompt in enumerate(prompts)))

    @override
    async def close(self) -> None:
        await self._session.close()

    async def _one(self, case: Case, prompt: list[int], number: int, received: Received) -> None:
        params = {"temperature": 0.0, "max_tokens": case.output_tokens, "ignore_eos": True, "logprobs": case.logprobs}
        body = {"token_ids": prompt, "sampling_params": params, "stream": not case.unary}
        async with self._session.post("/inference/v1/generate", json=body) as response:
            response.raise_for_status()
            if case.unary:
                self._record(await response.read(), number, received)
                return
            async for line in response.content:
                if line.startswith(_PREFIX) and not line.startswith(_END, len(_PREFIX)):
                    self._record(line[len(_PREFIX) :], number, received)

    def _record(self, text: bytes, number: int, received: Received) -> None:
        for choice in self._decode(text).choices:
            if choice.token_ids:
                received.times[number].append(time.perf_counter())
                received.tokens[number].extend(choice.token_ids)
            if choice.logprobs is not None:
                received.logprobs[number].extend(item.logprob for item in choice.logprobs.content)


def make() -> HttpContender:
    """Create the contender."""
    return HttpContender()
