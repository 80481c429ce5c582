"""An OpenAI-compatible HTTP front end for a tokenwire engine: a minimal coordinator.

python examples/openai_gateway/gateway.py --engine 127.0.0.1:50051 --tokenizer MODEL_DIR --port 8000
"""

import argparse
import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import tokenwire
from tokenwire import SamplingParams
from tokenwire.text import ChatTemplateError, Prompt, TextClient, TextError, TextResult, TextStream

_T = TypeVar("_T")

ERROR_STATUSES: list[tuple[type[Exception], int, str]] = [
    (msgspec.MsgspecError, 400, "invalid_request_error"),
    (TextError, 400, "invalid_request_error"),
    (tokenwire.InvalidArgumentError, 400, "invalid_request_error"),
    (tokenwire.FailedPreconditionError, 400, "invalid_request_error"),
    (tokenwire.UnimplementedError, 400, "invalid_request_error"),
    (tokenwire.NotFoundError, 404, "not_found_error"),
    (tokenwire.ResourceExhaustedError, 413, "invalid_request_error"),
    (tokenwire.UnavailableError, 503, "overloaded_error"),
    (tokenwire.UnreachableError, 503, "overloaded_error"),
    (tokenwire.TokenwireError, 500, "server_error"),
]


# What OpenAI's clients send although it asks for nothing: these values are taken, any other is refused.
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Notes for OpenAI's own bookkeeping and caches, which do not change the answer.
IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"}

ROLES = {"system", "developer", "user", "assistant", "tool"}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream reports in addition to the text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The fields that both endpoints have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    # Named as in SamplingParams.
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    # vLLM's extensions of the OpenAI API.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters for the engine."""
        names = set(SamplingParams.__struct_fields__) & set(self.__struct_fields__)
        return SamplingParams(**{name: getattr(self, name) for name in names})

    def prompts(self) -> list[Prompt]:
        """Return the prompts, one per choice."""
        raise NotImplementedError


class ChatCompletion(Completion, kw_only=True):
    """The request body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens

    def prompts(self) -> list[Prompt]:
        """Return the messages, as one prompt. Raises InvalidArgumentError."""
        if not self.messages:
            raise refused("messages", "must have at least one message")
        return [[_message(position, message) for position, message in enumerate(self.messages)]]


class PlainCompletion(Completion, kw_only=True):
    """The request body of /v1/completions."""

    prompt: str | list[Any]

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            self.max_tokens = 16

    def prompts(self) -> list[Prompt]:
        """Return the prompts: texts or lists of token ids. Raises InvalidArgumentError."""
        several = isinstance(self.prompt, list) and not all(type(item) is int for item in self.prompt)
        prompts: list[Any] = self.prompt if several and isinstance(self.prompt, list) else [self.prompt]
        for prompt in prompts:
            is_ids = isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)
            if not is_ids and not isinstance(prompt, str):
                raise refused("prompt", "must be a text, a list of token ids, or a list of these, none of them empty")
        return prompts


_AnyCompletion = TypeVar("_AnyCompletion", bound=Completion)


def parse(content: bytes, kind: type[_AnyCompletion]) -> _AnyCompletion:
    """Parse a request body. What asks for nothing is dropped; what is not supported is refused, never ignored."""
    body = msgspec.json.decode(content, type=dict[str, Any])
    for name, accepted in ASKS_FOR_NOTHING.items():
        value = body.pop(name, None)
        if value is not None and not any(type(value) is type(item) and value == item for item in accepted):
            raise refused(name, f"is not supported with the value {str(value)[:100]!r}")
    unknown = body.keys() - set(kind.__struct_fields__) - IGNORED
    if unknown:
        raise refused(min(unknown), "is not supported")
    return msgspec.convert(body, kind, str_keys=True)


def refused(field: str, description: str) -> tokenwire.InvalidArgumentError:
    """Make the error for a field of the request body."""
    violation = tokenwire.FieldViolation(field, description)
    return tokenwire.InvalidArgumentError(f"{field}: {description}", field_violations=[violation])


def _message(position: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it. Raises InvalidArgumentError."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise refused(
            f"messages[{position}].role", f"must be one of {', '.join(sorted(ROLES))}, not {str(role)[:100]!r}"
        )
    if content is None and role != "assistant":
        raise refused(f"messages[{position}].content", "must not be null")
    return {**message, "content": "" if content is None else content}


class Answer:
    """Builds the response objects of an endpoint: complete responses and chunks of a stream."""

    def __init__(self, body: Completion, request_id: str, model: str) -> None:
        self.is_chat = isinstance(body, ChatCompletion)
        self._common = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": body.model or model,
        }

    def whole(self, results: Sequence[TextResult]) -> dict[str, Any]:
        """Return the response that is not streamed."""
        choices = [
            self._choice(
                index,
                {"message": {"role": "assistant", "content": result.text}} if self.is_chat else {"text": result.text},
                result,
            )
            for index, result in enumerate(results)
        ]
        return self._object("chat.completion", choices, usage=usage(results))

    def chunk(self, index: int, text: str, result: TextResult | None = None, **delta: str) -> dict[str, Any]:
        """Return a chunk of a stream; the last one of a choice has the result."""
        content = {"delta": {**delta, "content": text}} if self.is_chat else {"text": text}
        return self._object("chat.completion.chunk", [self._choice(index, content, result)])

    def usage_chunk(self, results: Sequence[TextResult]) -> dict[str, Any]:
        """Return the usage chunk, which follows the last one if `include_usage` is set."""
        return self._object("chat.completion.chunk", [], usage=usage(results))

    def _choice(self, index: int, content: dict[str, Any], result: TextResult | None) -> dict[str, Any]:
        ending = {
            "finish_reason": None if result is None else result.finish_reason,
            "stop_reason": None if result is None else result.stop_reason,
        }
        return {"index": index, **content, "logprobs": None, **ending}

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._common, "object": kind if self.is_chat else "text_completion", "choices": choices, **more}


def usage(results: Sequence[TextResult]) -> dict[str, Any]:
    """Return the token counts of all choices in OpenAI's format."""
    prompt = sum(result.usage.prompt_tokens for result in results)
    completion = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.usage.cached_tokens or 0 for result in results)},
    }


def json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def event(content: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def error_body(error: Exception, prompt: str) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and OpenAI's error object. `prompt` is the body's field that has the prompt."""
    status, kind = next((status, kind) for types, status, kind in ERROR_STATUSES if isinstance(error, types))
    parameter = code = None
    if isinstance(error, tokenwire.StatusError):
        code = error.reason or None
        if error.field_violations:
            field = error.field_violations[0].field
            parameter = field if field.startswith(prompt) else field.rpartition(".")[2].partition("[")[0]
    elif isinstance(error, msgspec.ValidationError):
        # The message ends with the place: "... - at `$.temperature`".
        parameter = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else None
    elif isinstance(error, ChatTemplateError):
        parameter = prompt
    if parameter in ("prompt", "prompt_token_ids"):
        parameter = prompt
    return status, {"error": {"message": str(error), "type": kind, "param": parameter, "code": code}}


async def error_response(request: Request, error: Exception) -> Response:
    """Convert an error to OpenAI's error JSON."""
    status, body = error_body(error, "messages" if "chat" in request.url.path else "prompt")
    delay = getattr(error, "retry_delay", None)
    return json(body, status, None if delay is None else {"retry-after": f"{delay:.0f}"})


async def unless_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """Await the work, or cancel it if the HTTP client disconnects, which aborts the engine's request."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.create_task(watch())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def gone(_request: Request, _error: Exception) -> Response:
    """Respond to a client that has disconnected."""
    return Response(status_code=499)


class Gateway:
    """The HTTP endpoints in front of one engine."""

    def __init__(self, text: TextClient, model_names: Sequence[str]) -> None:
        self._text = text
        self._model_names = model_names

    def app(self) -> Starlette:
        """Return the ASGI application."""
        handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
            error: error_response for error, _, _ in ERROR_STATUSES
        }
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
            ],
            exception_handlers=handlers | {ClientDisconnect: gone},
        )

    async def models(self, _request: Request) -> Response:
        """List the models."""
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "tokenwire"} for name in self._model_names]
        return json({"object": "list", "data": models})

    async def chat_completions(self, request: Request) -> Response:
        """Complete a chat."""
        return await self._answer(request, parse(await request.body(), ChatCompletion))

    async def completions(self, request: Request) -> Response:
        """Complete one text or several."""
        return await self._answer(request, parse(await request.body(), PlainCompletion))

    async def _answer(self, request: Request, body: Completion) -> Response:
        request_id = uuid.uuid4().hex
        options: Any = {"stop": body.stop, "model": body.model}
        options["include_stop_str_in_output"] = body.include_stop_str_in_output
        params = body.sampling_params()
        answer = Answer(body, request_id, self._model_names[0])
        prompts = [
            (prompt, f"{request_id}-{index}" if index else request_id) for index, prompt in enumerate(body.prompts())
        ]
        if not body.stream:
            work = [self._text.complete(prompt, params, request_id=each, **options) for prompt, each in prompts]
            return json(answer.whole(await unless_disconnected(request, all_of(work))))
        texts = [self._text.stream(prompt, params, request_id=each, **options) for prompt, each in prompts]
        pieces = merged(texts)
        # Once there is a piece, the engine has accepted a request; before that, an error can still be an HTTP status.
        first = await unless_disconnected(request, anext(pieces))
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        chunks = events(answer, texts, pieces, first, with_usage=with_usage)
        return StreamingResponse(chunks, media_type="text/event-stream")


async def merged(texts: Sequence[TextStream]) -> AsyncGenerator[tuple[int, str | None]]:
    """Yield the pieces of several texts with the text's index as they arrive; None at the end of a text."""
    pieces: asyncio.Queue[tuple[int, str | None] | Exception] = asyncio.Queue(maxsize=1)

    async def read(index: int, text: TextStream) -> None:
        try:
            async with text:
                async for piece in text:
                    await pieces.put((index, piece))
            await pieces.put((index, None))
        except Exception as error:  # noqa: BLE001  # raised below
            await pieces.put(error)

    readers = [asyncio.create_task(read(index, text)) for index, text in enumerate(texts)]
    try:
        running = len(texts)
        while running:
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            running -= piece[1] is None
            yield piece
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def all_of(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results of several coroutines. The first error cancels the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def events(
    answer: Answer,
    texts: Sequence[TextStream],
    pieces: AsyncGenerator[tuple[int, str | None]],
    first: tuple[int, str | None],
    *,
    with_usage: bool,
) -> AsyncIterator[bytes]:
    """Yield texts as events. Starlette cancels this if the client disconnects, which aborts the requests.

    Args:
        answer: builds the chunks.
        texts: the texts, which have their results at the end.
        pieces: the pieces of the texts.
        first: the piece that has been read already.
        with_usage: whether to append the token counts.

    """
    try:
        async with contextlib.aclosing(pieces):
            if answer.is_chat:
                yield event(answer.chunk(first[0], "", role="assistant"))
            yield event(_chunk(answer, texts, *first))
            async for piece in pieces:
                yield event(_chunk(answer, texts, *piece))
        if with_usage:
            yield event(answer.usage_chunk([text.result for text in texts]))
    except tokenwire.TokenwireError as error:
        yield event(error_body(error, "messages" if answer.is_chat else "prompt")[1])
    yield b"data: [DONE]\n\n"


def _chunk(answer: Answer, texts: Sequence[TextStream], index: int, piece: str | None) -> dict[str, Any]:
    return answer.chunk(index, "", texts[index].result) if piece is None else answer.chunk(index, piece)


async def main() -> None:
    """Serve until interrupted by a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engine", default="127.0.0.1:50051", help="address of the tokenwire server (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer", help="the model's directory (default: the engine's, if it exists on this machine)"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    async with tokenwire.AsyncClient(arguments.engine) as client:
        await client.wait_ready()
        text = await TextClient.open(client, arguments.tokenizer)
        info = await client.engine_info()
        names = [*info.served_model_names, *(adapter.name for adapter in info.adapters)] or [info.model]
        app = Gateway(text, names).app()
        await uvicorn.Server(uvicorn.Config(app, arguments.host, arguments.port)).serve()


if __name__ == "__main__":
    # uvicorn raises the signal again after its shutdown.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
