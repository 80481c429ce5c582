"""Text equals what vLLM's /v1/chat/completions says for the same input, and the ways to get it work end to end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import openai
import pytest

from harness import COMMAND, ServerProcess, run
from harness.http import serve_http
from harness.vllm_http import VllmServer
from openai_gateway.gateway import Gateway
from tokenwire import AbortOutcome, AsyncClient, SamplingParams
from tokenwire.text import TextClient, TextResult

QUESTION = "How many countries are in the European Union?"
QUESTIONS = [
    QUESTION,
    "Count from one to twenty in words.",
    "Answer with five emojis only: 😀🎉",
    "Write 'good morning' in Japanese, Russian and French.",
    "Write a Python function that adds two numbers.",
    "List three animals, one per line.",
]
MAX_TOKENS = 24

# The first test starts two engines and asks one of them some 20 questions.
pytestmark = pytest.mark.timeout(300)


class Chat(NamedTuple):
    """A request to /v1/chat/completions, and its answer."""

    body: dict[str, Any]
    answer: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.body["messages"]
        return messages


@pytest.fixture(scope="module")
def chats(vllm: VllmServer) -> list[Chat]:
    """Ask `vllm serve`: each question as it is, then with stop strings out of its own answer."""
    vllm.wait_ready()

    def ask(question: str, **fields: Any) -> Chat:
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0.0, "max_tokens": MAX_TOKENS, **fields}
        response = vllm.client.post("/v1/chat/completions", json=body)
        assert response.is_success, response.text
        return Chat(body, response.json())

    asked = []
    for question in QUESTIONS:
        plain = ask(question)
        text = plain.answer["choices"][0]["message"]["content"]
        third, half = len(text) // 3, len(text) // 2
        asked += [
            plain,
            # Across the borders of tokens, wherever they are.
            ask(question, stop=[text[third : third + 7] or "none"]),
            ask(question, stop=["never there", text[half : half + 3] or "none"], include_stop_str_in_output=True),
            ask(question, stop=text[:2] or "none", min_tokens=4),
        ]
    return asked


def summary(result: TextResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }


def expected(chat: Chat) -> dict[str, Any]:
    [choice] = chat.answer["choices"]
    return {
        "text": choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "prompt_tokens": chat.answer["usage"]["prompt_tokens"],
        "completion_tokens": chat.answer["usage"]["completion_tokens"],
    }


@pytest.fixture
async def text(client: AsyncClient) -> TextClient:
    return await TextClient.open(client)


def arguments_of(chat: Chat) -> tuple[SamplingParams, dict[str, Any]]:
    names = ("temperature", "max_tokens", "min_tokens")
    params = SamplingParams(**{name: chat.body[name] for name in names if name in chat.body})
    return params, {name: chat.body[name] for name in ("stop", "include_stop_str_in_output") if name in chat.body}


async def test_complete_is_chat_completions(text: TextClient, chats: list[Chat]) -> None:
    for chat in chats:
        params, options = arguments_of(chat)
        assert summary(await text.complete(chat.messages, params, **options)) == expected(chat), chat.body
    reasons = [chat.answer["choices"][0]["stop_reason"] for chat in chats]
    assert sum(isinstance(reason, str) for reason in reasons) >= len(chats) // 3


async def test_a_stream_over_multiplex_is_chat_completions(
    client: AsyncClient, text: TextClient, chats: list[Chat]
) -> None:
    overruns = []
    async with client.multiplex() as multiplex:
        for chat in chats:
            params, options = arguments_of(chat)
            async with text.over(multiplex).stream(chat.messages, params, **options) as stream:
                pieces = [piece async for piece in stream]
            assert "".join(pieces) == stream.result.text
            assert summary(stream.result) == expected(chat), chat.body
            if isinstance(stream.result.stop_reason, str):
                overruns.append(stream.result.overrun_tokens)
    # How many depends on the machine; 0 to 4 were seen. `tokenwire.text` reports it, it promises no number.
    assert all(overrun is not None for overrun in overruns), overruns


async def test_the_engine_has_let_go_at_the_match(client: AsyncClient, text: TextClient) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1900)
    async with asyncio.timeout(60):
        result = await text.complete([{"role": "user", "content": QUESTION}], params, stop="member")
    assert result.text.endswith("27 ")
    [abort] = await client.abort([result.request_id])
    # Its own abort came before.
    assert abort.outcome is AbortOutcome.ABORTED
    assert result.overrun_tokens is not None
    assert result.overrun_tokens <= 3


@pytest.fixture
async def openai_client(text: TextClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve_http(Gateway(text, ["smol"]).app()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as client,
    ):
        yield client


async def test_the_gateway_answers_the_openai_client(openai_client: openai.AsyncOpenAI, chats: list[Chat]) -> None:
    chat = chats[0]
    create: Any = openai_client.chat.completions.create
    fields = {"messages": chat.messages, "temperature": 0.0, "max_tokens": MAX_TOKENS}
    model = (await anext(aiter(openai_client.models.list()))).id
    whole = await create(model=model, **fields, extra_body={"model": None})
    assert whole.choices[0].message.content == chat.answer["choices"][0]["message"]["content"]
    assert whole.usage.completion_tokens == chat.answer["usage"]["completion_tokens"]
    stream = await create(model=model, **fields, stream=True, extra_body={"model": None})
    pieces = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content


async def test_the_gateway_tells_what_the_engine_refuses(openai_client: openai.AsyncOpenAI) -> None:
    create: Any = openai_client.chat.completions.create
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.NotFoundError):
        await create(model="absent", messages=messages)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="smol", messages=messages, extra_body={"model": None, "top_p": 7})
    assert caught.value.param == "top_p"


async def test_a_client_of_the_gateway_that_goes_away(client: AsyncClient, openai_client: openai.AsyncOpenAI) -> None:
    async def generated(live: int) -> int:
        """Wait until the server has so many requests, and return the tokens that its engine has generated."""
        async with asyncio.timeout(60):
            while (load := await client.engine_load()).num_live_requests != live:  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(0.02)
        return sum(rank.generation_tokens or 0 for rank in load.ranks)

    before = await generated(0)
    create: Any = openai_client.chat.completions.create
    endless = {"ignore_eos": True, "max_tokens": 1900, "model": None}
    messages = [{"role": "user", "content": QUESTION}]
    stream = await create(model="smol", messages=messages, stream=True, extra_body=endless)
    chunk = await anext(aiter(stream))
    request_id = chunk.id.removeprefix("chatcmpl-")
    await generated(1)
    await stream.close()
    # It was aborted: the engine did not go on to the end of it.
    assert await generated(0) - before < 1900
    [abort] = await client.abort([request_id])
    assert abort.outcome is AbortOutcome.ALREADY_FINISHED


def test_the_command_chats(server: ServerProcess) -> None:
    done = run([COMMAND, "chat", QUESTION, "--temperature", "0", "--max-tokens", "64", "--target", server.address])
    assert done.exit_code == 0, done.stderr
    assert "27 member states" in done.stdout
