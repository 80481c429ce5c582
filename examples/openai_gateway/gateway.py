"""An OpenAI-compatible HTTP front end for a tokenwire engine: a minimal coordinator.

python examples/openai_gateway/gateway.py --engine 127.0.0.1:50051 --tokenizer MODEL_DIR --port 8000
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import tokenwire
from tokenwire import SamplingParams
from tokenwire.text import Prompt, TextClient, TextError, TextOptions, TextResult, TextStream

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


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream reports in addition to the text."""

    include_usage: bool = False


class Completion(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that both endpoints have in common. Fields that are not listed are refused, not ignored."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
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


class ChatCompletion(Completion, kw_only=True):
    """The request body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens


class PlainCompletion(Completion, kw_only=True):
    """The request body of /v1/completions."""

    prompt: str | list[int]
    max_tokens: int | None = 16


class Answer:
    """Builds the response objects of an endpoint: complete responses and chunks of a stream."""

    def __init__(self, body: Completion, request_id: str, model: str) -> None:
        self.is_chat = isinstance(body, ChatCompletion)
        self._common = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": body.model or model,
        }

    def whole(self, result: TextResult) -> dict[str, Any]:
        """Return the response that is not streamed."""
        content = {"message": {"role": "assistant", "content": result.text}} if self.is_chat else {"text": result.text}
        return self._object("chat.completion", [self._choice(content, result)], usage=usage(result))

    def chunk(self, text: str, result: TextResult | None = None, **delta: str) -> dict[str, Any]:
        """Return a chunk of a stream; the last one has the result."""
        content = {"delta": {**delta, "content": text}} if self.is_chat else {"text": text}
        return self._object("chat.completion.chunk", [self._choice(content, result)])

    def usage_chunk(self, result: TextResult) -> dict[str, Any]:
        """Return the usage chunk, which follows the last one if `include_usage` is set."""
        return self._object("chat.completion.chunk", [], usage=usage(result))

    def _choice(self, content: dict[str, Any], result: TextResult | None) -> dict[str, Any]:
        ending = {
            "finish_reason": None if result is None else result.finish_reason,
            "stop_reason": None if result is None else result.stop_reason,
        }
        return {"index": 0, **content, "logprobs": None, **ending}

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._common, "object": kind if self.is_chat else "text_completion", "choices": choices, **more}


def usage(result: TextResult) -> dict[str, Any]:
    """Return the token counts in OpenAI's format."""
    counts = result.usage
    total = counts.prompt_tokens + counts.completion_tokens
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens or 0},
    }


def json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def event(content: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and OpenAI's error object."""
    status, kind = next((status, kind) for types, status, kind in ERROR_STATUSES if isinstance(error, types))
    violations = error.field_violations if isinstance(error, tokenwire.StatusError) else ()
    parameter = violations[0].field.rpartition(".")[2] if violations else None
    code = error.reason if isinstance(error, tokenwire.StatusError) else None
    return status, {"error": {"message": str(error), "type": kind, "param": parameter, "code": code or None}}


async def error_response(_request: Request, error: Exception) -> Response:
    """Convert an error to OpenAI's error JSON."""
    status, body = error_body(error)
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
        body = msgspec.json.decode(await request.body(), type=ChatCompletion)
        return await self._answer(request, body, body.messages)

    async def completions(self, request: Request) -> Response:
        """Complete a text."""
        body = msgspec.json.decode(await request.body(), type=PlainCompletion)
        return await self._answer(request, body, body.prompt)

    async def _answer(self, request: Request, body: Completion, prompt: Prompt) -> Response:
        options: TextOptions = {"stop": body.stop, "model": body.model}
        options["include_stop_str_in_output"] = body.include_stop_str_in_output
        model = self._model_names[0]
        if not body.stream:
            work = self._text.complete(prompt, body.sampling_params(), **options)
            result = await unless_disconnected(request, work)
            return json(Answer(body, result.request_id, model).whole(result))
        text = self._text.stream(prompt, body.sampling_params(), **options)
        # Once there is a piece, the engine has accepted the request; before that, an error can still be an HTTP status.
        first = await unless_disconnected(request, anext(text, ""))
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = events(Answer(body, text.request_id, model), text, first, with_usage=with_usage)
        return StreamingResponse(chunks, media_type="text/event-stream")


async def events(answer: Answer, text: TextStream, first: str, *, with_usage: bool) -> AsyncIterator[bytes]:
    """Yield a text as events. Starlette cancels this if the client disconnects, which leaves the block."""
    try:
        async with text:
            yield event(answer.chunk(first, role="assistant") if answer.is_chat else answer.chunk(first))
            async for piece in text:
                yield event(answer.chunk(piece))
        yield event(answer.chunk("", text.result))
        if with_usage:
            yield event(answer.usage_chunk(text.result))
    except tokenwire.TokenwireError as error:
        yield event(error_body(error)[1])
    yield b"data: [DONE]\n\n"


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
