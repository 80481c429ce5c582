"""The official OpenAI client against the example gateway, over a scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from harness.http import serve_http
from harness.text_engine import Engine
from openai_gateway.gateway import Gateway
from tokenwire import (
    FieldViolation,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnreachableError,
)
from tokenwire.text import TextClient, TextTokenizer

LIMIT = 20.0
ANSWER = "The story ends here. END And more."
MESSAGES: list[Any] = [{"role": "user", "content": "one"}]


@pytest.fixture
def engine(tokenizer: TextTokenizer) -> Engine:
    return Engine([[token] for token in tokenizer.encode(ANSWER)], finish_reason=FinishReason.LENGTH)


@pytest.fixture
async def client(engine: Engine, tokenizer: TextTokenizer) -> AsyncIterator[openai.AsyncOpenAI]:
    app = Gateway(TextClient(engine, tokenizer), ["model", "adapter"]).app()
    async with (
        serve_http(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as client,
    ):
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["model", "adapter"]


async def test_chat(client: openai.AsyncOpenAI, engine: Engine, tokenizer: TextTokenizer) -> None:
    completion = await client.chat.completions.create(
        model="model", messages=MESSAGES, max_completion_tokens=50, temperature=0, seed=4, logit_bias={"7": 1}
    )
    [choice] = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "length"
    assert completion.object == "chat.completion"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(tokenizer.encode_chat(MESSAGES))
    assert completion.usage.completion_tokens == len(tokenizer.encode(ANSWER))
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 3
    assert engine.prompts == [tokenizer.encode_chat(MESSAGES)]
    [options] = engine.options
    assert options["model"] == "model"
    assert completion.id == f"chatcmpl-{options['request_id'].removesuffix('-0')}"
    params = engine.params[0]
    assert (params.max_tokens, params.temperature, params.seed, params.logit_bias) == (50, 0, 4, {7: 1})


async def test_chat_stream(client: openai.AsyncOpenAI, engine: Engine) -> None:
    stream = await client.chat.completions.create(
        model="model", messages=MESSAGES, stream=True, stop=["END"], stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "The story ends here. "
    assert len(chunks) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert engine.aborts == 1


async def test_completions(client: openai.AsyncOpenAI, engine: Engine) -> None:
    completion = await client.completions.create(model="model", prompt=[5, 6], stop="END")
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("The story ends here. ", "stop")
    assert completion.object == "text_completion"
    assert engine.prompts == [[5, 6]]
    assert engine.params[0].max_tokens == 16
    stream = await client.completions.create(model="model", prompt="one", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


# What clients send although it asks for nothing.
NOTHING: dict[str, list[Any]] = {
    "best_of": [None, 1],
    "echo": [None, False],
    "function_call": ["none"],
    "functions": [[]],
    "logprobs": [None, False],
    "metadata": [None, {"team": "search"}],
    "modalities": [["text"]],
    "n": [None, 1],
    "parallel_tool_calls": [None, True, False],
    "prompt_cache_key": ["k"],
    "response_format": [None, {"type": "text"}],
    "safety_identifier": ["u"],
    "service_tier": [None, "auto", "default"],
    "store": [None, False],
    "stream": [None],
    "stream_options": [None],
    "suffix": [None, ""],
    "temperature": [None],
    "tool_choice": [None, "none", "auto"],
    "tools": [None, []],
    "top_logprobs": [None, 0],
    "user": ["u"],
}


@pytest.mark.parametrize("name", NOTHING)
async def test_what_asks_for_nothing_is_taken(client: openai.AsyncOpenAI, name: str) -> None:
    """FAULTS D11."""
    for value in NOTHING[name]:
        completion = await client.chat.completions.create(model="model", messages=MESSAGES, extra_body={name: value})
        assert completion.choices[0].message.content == ANSWER
        text = await client.completions.create(model="model", prompt="one", extra_body={name: value})
        assert text.choices[0].text == ANSWER


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "Expected `float | null`, got `str`"),
        ({"stop": ""}, "stop", "stop[0]: must be a non-empty text"),
        ({"stop": ["END", "<|end|>"]}, "stop", "stop_token_ids=[1]"),
        ({"n": 2}, "n", "n: must be 1"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"frob": 1}, "frob", "frob: is not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"logprobs": 0}, "logprobs", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"service_tier": "flex"}, "service_tier", "flex"),
        ({"store": True}, "store", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "not supported"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "list of text parts"),
    ],
)
async def test_bad_requests(client: openai.AsyncOpenAI, options: dict[str, Any], param: str, message: str) -> None:
    """FAULTS D11, F9."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="model", messages=MESSAGES, extra_body=options)
    assert message in caught.value.message
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param


async def test_null_content_of_an_assistant(
    client: openai.AsyncOpenAI, engine: Engine, tokenizer: TextTokenizer
) -> None:
    """FAULTS D11."""
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": None}, {"role": "assistant"}]
    await client.chat.completions.create(model="model", messages=messages)
    empty = {"role": "assistant", "content": ""}
    assert engine.prompts == [tokenizer.encode_chat([*MESSAGES, empty, empty])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["one", "two"], [[5, 6], [7]], ["one"], ["one", [7]]])
async def test_a_list_of_prompts(
    client: openai.AsyncOpenAI, engine: Engine, tokenizer: TextTokenizer, prompts: Any, stream: bool
) -> None:
    """FAULTS D11."""
    texts = dict.fromkeys(range(len(prompts)), "")
    if stream:
        chunks = await client.completions.create(
            model="model", prompt=prompts, stream=True, stream_options={"include_usage": True}
        )
        reasons: list[str] = []
        async for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons.append(choice.finish_reason)
        usage = chunk.usage
        assert reasons.count("length") == len(prompts)
    else:
        completion = await client.completions.create(model="model", prompt=prompts)
        texts = {choice.index: choice.text for choice in completion.choices}
        usage = completion.usage
    assert texts == dict.fromkeys(range(len(prompts)), ANSWER)
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    assert sorted(engine.prompts) == sorted(ids)
    assert usage is not None
    assert usage.completion_tokens == len(prompts) * len(tokenizer.encode(ANSWER))
    assert len({options["request_id"] for options in engine.options}) == len(prompts)


@pytest.mark.parametrize("prompt", [[], [[]], ["one", []], ["one", None], [5, "one"], [5, -1.5], [True]])
async def test_what_is_no_prompt(client: openai.AsyncOpenAI, prompt: Any) -> None:
    """FAULTS D11."""
    with pytest.raises(openai.BadRequestError, match="list of token ids") as caught:
        await client.completions.create(model="model", prompt="one", extra_body={"prompt": prompt})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_one_prompt_ends_the_others(client: openai.AsyncOpenAI, engine: Engine, stream: bool) -> None:
    """FAULTS D11."""
    engine.fails = {0: OverloadedError("x", reason="QUEUE_FULL", retry_delay=2)}
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="model", prompt=["one", "two"], stream=stream)
    assert caught.value.status_code == 503


async def test_a_prompt_that_the_engine_refuses_is_named_as_the_body_names_it(
    client: openai.AsyncOpenAI, engine: Engine
) -> None:
    """FAULTS F9."""
    violation = FieldViolation("input.prompt_token_ids", "is too long")
    engine.fails = {0: InvalidArgumentError("x", field_violations=[violation])}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="model", messages=MESSAGES)
    assert caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="model", prompt="one")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            InvalidArgumentError("x", field_violations=[FieldViolation("input.top_p", "no")]),
            (400, "invalid_request_error"),
        ),
        (NotFoundError("x"), (404, "not_found_error")),
        (OverloadedError("x", reason="QUEUE_FULL", retry_delay=2), (503, "overloaded_error")),
        (UnreachableError("x"), (503, "overloaded_error")),
        (InternalError("x"), (500, "server_error")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_refusals(
    client: openai.AsyncOpenAI, engine: Engine, error: Exception, expected: tuple[int, str], stream: bool
) -> None:
    engine.fails = {0: error}
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="model", messages=MESSAGES, stream=stream)
    assert (caught.value.status_code, caught.value.type) == expected
    assert str(error) in caught.value.message
    if isinstance(error, InvalidArgumentError):
        assert caught.value.param == "top_p"
    if isinstance(error, OverloadedError):
        assert caught.value.code == "QUEUE_FULL"
        assert caught.value.response.headers["retry-after"] == "2"


async def test_an_error_after_the_first_piece_is_an_event(client: openai.AsyncOpenAI, engine: Engine) -> None:
    engine.fails = {4: InternalError("the engine has failed")}
    stream = await client.chat.completions.create(model="model", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the engine has failed"):
        _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_request(
    client: openai.AsyncOpenAI, engine: Engine, stream: bool
) -> None:
    engine.chunks *= 1000
    engine.step_time = 0.02
    create: Any = client.chat.completions.create
    call = asyncio.create_task(create(model="model", messages=MESSAGES, stream=stream))
    async with asyncio.timeout(LIMIT):
        if stream:
            chunks = await call
            await anext(chunks)
            await chunks.close()
        else:
            await engine.has_started.wait()
            call.cancel()
        await engine.has_closed.wait()
