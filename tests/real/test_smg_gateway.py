"""smg's own gateway in front of `tokenwire serve --smg`: a coordinator that is already deployed works unchanged."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import httpx
import pytest

from harness import COMMAND, ServerProcess, run
from harness.smg_gateway import smg_gateway
from tokenwire import AsyncClient, SamplingParams
from tokenwire.text import TextClient, TextTokenizer

QUESTION = [{"role": "user", "content": "How many countries are in the European Union?"}]
MAX_TOKENS = 48
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
"""A minute of the engine's work or so."""

_LIMIT = 60.0


class Answer(NamedTuple):
    text: str
    choice: dict[str, Any]
    """The answer's choice, or the last event's."""
    usage: dict[str, Any]


class Gateway(NamedTuple):
    http: httpx.AsyncClient
    model: str

    def post(self, **fields: Any) -> AbstractAsyncContextManager[httpx.Response]:
        body = {"model": self.model, "messages": QUESTION, "temperature": 0.0, "max_tokens": MAX_TOKENS, **fields}
        return self.http.stream("POST", "/v1/chat/completions", json=body)

    async def answer(self, **fields: Any) -> Answer:
        async with self.post(**fields) as response:
            await response.aread()
            assert response.is_success, response.text
            [choice] = response.json()["choices"]
            return Answer(choice["message"]["content"], choice, response.json()["usage"])

    async def stream(self, **fields: Any) -> Answer:
        async with self.post(stream=True, stream_options={"include_usage": True}, **fields) as response:
            assert response.is_success, await response.aread()
            lines = [line async for line in response.aiter_lines()]
        *events, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        pieces = [choice["delta"].get("content") or "" for choice in choices]
        assert sum(map(bool, pieces)) > 5
        return Answer("".join(pieces), choices[-1], last["usage"])


@pytest.fixture(scope="module")
def url(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with smg_gateway(server.address, tmp_path_factory.mktemp("smg") / "log") as url:
        yield url


@pytest.fixture
async def gateway(url: str, model: str) -> AsyncIterator[Gateway]:
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT, trust_env=False) as http:
        yield Gateway(http, model)


@pytest.fixture(scope="module")
def text_tokenizer(model: str) -> TextTokenizer:
    return TextTokenizer.load(model)


@pytest.fixture
def text(client: AsyncClient, text_tokenizer: TextTokenizer) -> TextClient:
    return TextClient(client, text_tokenizer)


async def live(client: AsyncClient, count: int) -> int:
    """Wait until the server holds so many requests; return the tokens that its engine has generated so far."""
    async with asyncio.timeout(_LIMIT):
        while True:
            load = await client.engine_load()
            if load.num_live_requests == count:
                return sum(rank.generation_tokens or 0 for rank in load.ranks)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("form", [Gateway.answer, Gateway.stream], ids=["answer", "stream"])
async def test_an_answer(gateway: Gateway, text: TextClient, form: Any) -> None:
    expected = await text.complete(QUESTION, PARAMS)
    assert "27 member states" in expected.text
    answer = await form(gateway)
    assert answer.text == expected.text
    assert answer.choice["finish_reason"] == expected.finish_reason == "stop"
    assert answer.usage["prompt_tokens"] == expected.usage.prompt_tokens
    assert answer.usage["completion_tokens"] == expected.usage.completion_tokens


@pytest.mark.parametrize("form", [Gateway.answer, Gateway.stream], ids=["answer", "stream"])
async def test_a_stop_string_ends_the_request(
    client: AsyncClient, gateway: Gateway, text: TextClient, form: Any
) -> None:
    stop = ["never there", "ember st"]
    expected = await text.complete(QUESTION, PARAMS, stop=stop)
    assert expected.stop_reason == "ember st"
    before = await live(client, 0)
    answer = await form(gateway, stop=stop, **ENDLESS)
    assert answer.text == expected.text
    assert (answer.choice["finish_reason"], answer.choice["matched_stop"]) == ("stop", "ember st")
    # The gateway would find the stop string by itself, but count what the engine goes on to generate.
    assert answer.usage["completion_tokens"] == expected.usage.completion_tokens
    assert await live(client, 0) - before < ENDLESS["max_tokens"]


async def test_a_stop_string_that_does_not_come(gateway: Gateway, text: TextClient) -> None:
    expected = await text.complete(QUESTION, PARAMS)
    answer = await gateway.stream(stop=["never there"])
    assert (answer.text, answer.choice["finish_reason"]) == (expected.text, "stop")
    assert "matched_stop" not in answer.choice


async def test_a_caller_that_leaves_its_stream_ends_the_request(client: AsyncClient, gateway: Gateway) -> None:
    before = await live(client, 0)
    async with gateway.post(stream=True, **ENDLESS) as response:
        async for line in response.aiter_lines():
            if '"delta":{"content":' in line:
                break
        await live(client, 1)
    assert await live(client, 0) - before < ENDLESS["max_tokens"]


async def test_a_caller_that_leaves_before_its_answer_ends_the_request(client: AsyncClient, gateway: Gateway) -> None:
    before = await live(client, 0)
    call = asyncio.create_task(gateway.answer(**ENDLESS))
    await live(client, 1)
    call.cancel()
    await asyncio.wait({call}, timeout=_LIMIT)
    assert call.cancelled()
    assert await live(client, 0) - before < ENDLESS["max_tokens"]


async def test_logprobs(client: AsyncClient, gateway: Gateway, text_tokenizer: TextTokenizer) -> None:
    answer = await gateway.answer(max_tokens=4, logprobs=True, top_logprobs=2)
    tokens = answer.choice["logprobs"]["content"]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    [expected] = (await client.generate(text_tokenizer.encode_chat(QUESTION), params)).outputs
    assert expected.logprobs is not None
    assert [token["token"] for token in tokens] == [text_tokenizer.decode([token]) for token in expected.token_ids]
    assert [token["logprob"] for token in tokens] == pytest.approx(expected.logprobs.logprobs)
    top = [entry["logprob"] for token in tokens for entry in token["top_logprobs"]]
    assert top == pytest.approx(expected.logprobs.top_logprobs)


async def test_a_refusal_names_what_is_wrong(gateway: Gateway) -> None:
    async with gateway.post(n=2) as response:
        await response.aread()
    assert response.status_code == 400
    assert "sampling_params.n: must be 1 with greedy sampling" in response.json()["error"]["message"]


def test_a_caller_who_leaves_in_the_middle_of_the_tokenizer_is_not_logged(server: ServerProcess) -> None:
    grpcurl = f"{COMMAND.parent}/grpcurl -plaintext {server.address} vllm.grpc.engine.VllmEngine/GetTokenizer"
    for _ in range(10):
        # head takes the beginning and goes away, and grpcurl with it.
        assert run(["bash", "-c", f"{grpcurl} 2>/dev/null | head -c 50"], timeout=60).stdout
    assert "GetTokenizer" not in server.log
