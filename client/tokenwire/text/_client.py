"""Text in, text out, on top of an engine that takes and returns token ids."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack, cast

from tokenwire._client import AsyncClient
from tokenwire._multiplex.typed_view import Multiplex
from tokenwire._sampling_params import SamplingParams
from tokenwire._wire import sequence
from tokenwire.text._assembler import TextAssembler
from tokenwire.text._carrier import Carrier, Started, carrier_of
from tokenwire.text._errors import TokenizerError, TokenizerMismatchError
from tokenwire.text._options import CompletionOptions, TextOptions
from tokenwire.text._request import TextRequest
from tokenwire.text._result import TextResult
from tokenwire.text._stream import TextStream
from tokenwire.text._tokenizer import Message, TextTokenizer

Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""A text, chat messages, or token ids."""


class TextClient:
    """Completes text: tokenizes, detokenizes and matches stop strings in this process, and aborts at a match.

        text = await TextClient.open(client, "MODEL_DIR")
        result = await text.complete("The capital of France is", SamplingParams(max_tokens=8), stop=["."])

    Results equal those of vLLM's own server for the same input. A request has one sequence (n = 1), since a sequence
    that meets its stop string cannot be ended before the others. To sample several, start several requests: the prefix
    cache makes them cheap.
    """

    def __init__(self, engine: AsyncClient | Multiplex | Carrier, tokenizer: TextTokenizer) -> None:
        self._carrier = carrier_of(engine)
        self.tokenizer = tokenizer
        """The tokenizer."""

    @classmethod
    async def open(cls, client: AsyncClient, folder: str | Path | None = None) -> Self:
        """Load the tokenizer in a model's folder and check that its ids are in the engine's vocabulary.

        Args:
            client: the client to send requests with.
            folder: the model's folder; None: the engine's model, if that is a folder on this machine.

        Returns:
            The text client.

        Raises:
            TokenizerError: the tokenizer cannot be loaded.
            TokenizerMismatchError: it has ids outside the engine's vocabulary.
            TokenwireError: whatever `engine_info` raises.

        """
        info = await client.engine_info()
        if folder is None:
            if not Path(info.model).is_dir():  # noqa: ASYNC240  # once, at start-up
                raise TokenizerError(
                    f"the engine's model, {info.model}, is not a folder on this machine: pass the tokenizer's folder"
                )
            folder = info.model
        tokenizer = await asyncio.to_thread(TextTokenizer.load, folder)
        if info.vocab_size is not None and tokenizer.vocab_size > info.vocab_size:
            raise TokenizerMismatchError(
                f"the tokenizer in {folder} has {tokenizer.vocab_size} ids, more than the {info.vocab_size} of "
                f"{info.model}: it belongs to another model"
            )
        return cls(client, tokenizer)

    def over(self, engine: AsyncClient | Multiplex | Carrier) -> Self:
        """Return a client with the same tokenizer that sends its requests over `engine`, a multiplex for example."""
        return type(self)(engine, self.tokenizer)

    async def encode(
        self, prompt: Prompt, *, add_special_tokens: bool = True, template_options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: a text, chat messages, which the chat template renders, or token ids.
            add_special_tokens: whether a text gets BOS and other special tokens, if the model has them.
            template_options: keyword arguments of transformers' `apply_chat_template`. None: no arguments.

        Returns:
            The token ids.

        Raises:
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
            InvalidArgumentError: the text cannot be encoded.

        """
        if isinstance(prompt, str):
            return await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
        if prompt and isinstance(prompt[0], Mapping):
            messages = cast("Sequence[Message]", prompt)
            return await asyncio.to_thread(self.tokenizer.encode_chat, messages, template_options)
        return list(sequence("prompt", cast("Sequence[int]", prompt)))

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[TextOptions]
    ) -> TextResult:
        """Complete a prompt and return when the text is complete.

        Args:
            prompt: a text, chat messages, or token ids.
            sampling_params: how to sample; `n` must be 1 or None. None: the model's defaults.
            **options: fields of `TextOptions`, which include `timeout`, `metadata` and those of `GenerationOptions`.

        Returns:
            The text, with its tokens, finish reason, stop reason and usage.

        Raises:
            InvalidArgumentError: a value is invalid, an empty stop string for example.
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
            TokenwireError: the request was refused or failed, as in `AsyncClient.generate`.

        """
        completion = CompletionOptions(sampling_params, options, self.tokenizer.special_tokens)
        if completion.stop:
            async with self._stream(prompt, completion) as pieces:
                async for _ in pieces:
                    pass
            return pieces.result
        token_ids = await self._encode(prompt, completion)
        answer = await self._carrier.generate(token_ids, completion.params, **completion.generation)
        request = self._request(token_ids, completion)
        request.take(answer)
        return request.result(answer.request_id)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[TextOptions]
    ) -> TextStream:
        """Complete a prompt and return the text as it arrives; see `TextStream`.

            async with text.stream(messages, params, stop=["###"]) as pieces:
                async for piece in pieces:
                    print(piece, end="", flush=True)

        Args:
            prompt: a text, chat messages, or token ids.
            sampling_params: how to sample; `n` must be 1 or None. None: the model's defaults.
            **options: fields of `TextOptions`, which include `timeout`, `metadata` and those of `GenerationOptions`.

        Returns:
            The stream of text pieces. Entering its block raises what encoding the prompt and starting the request
            raise.

        Raises:
            InvalidArgumentError: an option is invalid, an empty stop string for example.

        """
        completion = CompletionOptions(sampling_params, options, self.tokenizer.special_tokens)
        return self._stream(prompt, completion)

    def _stream(self, prompt: Prompt, completion: CompletionOptions) -> TextStream:
        async def start() -> tuple[TextRequest, Started]:
            token_ids = await self._encode(prompt, completion)
            request = self._request(token_ids, completion)
            return request, self._carrier.start(token_ids, completion.params, **completion.generation)

        return TextStream(start)

    async def _encode(self, prompt: Prompt, completion: CompletionOptions) -> list[int]:
        return await self.encode(
            prompt,
            add_special_tokens=completion.add_special_tokens,
            template_options=completion.template_options,
        )

    def _request(self, token_ids: list[int], completion: CompletionOptions) -> TextRequest:
        detokenizer = self.tokenizer.detokenizer(token_ids, skip_special_tokens=completion.skip_special_tokens)
        assembler = TextAssembler(
            detokenizer,
            completion.stop,
            min_tokens=completion.params.min_tokens or 0,
            include_stop_str_in_output=completion.include_stop,
        )
        return TextRequest(token_ids, assembler)
