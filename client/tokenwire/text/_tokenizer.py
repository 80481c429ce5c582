"""The tokenizer and chat template of a model, loaded from its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from tokenwire._errors import FieldViolation
from tokenwire._wire import invalid
from tokenwire.text._detokenizer import Detokenizer
from tokenwire.text._errors import ChatTemplateError, TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""A chat message in OpenAI's format: role, content, and other keys that the template reads."""


class TextTokenizer:
    """Encodes texts and chat messages, and makes detokenizers. Thread-safe."""

    def __init__(self, pretrained: Any, folder: str = "") -> None:
        """Wrap a fast tokenizer of transformers, which was loaded from `folder`. "": unknown."""
        self._pretrained = pretrained
        self._folder = folder
        self._backend: Tokenizer = pretrained.backend_tokenizer
        # The tokenizer file may enable them. transformers sets them per call, which is not thread-safe.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = max(self._backend.get_vocab().values(), default=-1) + 1
        """The highest token id plus 1."""
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        """Ids of the special tokens, by their text."""

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load from a model's folder, without network access. Takes seconds: in async code, use a thread.

        Returns:
            The tokenizer.

        Raises:
            TokenizerError: there is no tokenizer in the folder, or it cannot be loaded.

        """
        if not Path(folder).is_dir():
            raise TokenizerError(f"no tokenizer at {folder}: it is not a folder")
        # Takes seconds to import, and is only needed here.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            pretrained = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise many kinds
            message = f"cannot load a tokenizer from {folder}: {type(error).__name__}: {' '.join(str(error).split())}"
            raise TokenizerError(message) from error
        if getattr(pretrained, "backend_tokenizer", None) is None:
            raise TokenizerError(f"the tokenizer in {folder} is not supported by the tokenizers library")
        return cls(pretrained, str(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template, which chat messages need."""
        return self._pretrained.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with BOS and other special tokens if the model has them.

        Raises InvalidArgumentError for a lone surrogate, which UTF-8 cannot encode.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise invalid(FieldViolation("prompt", "must be text that UTF-8 can encode")) from None

    def encode_chat(self, messages: Sequence[Message], template_options: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of chat messages, rendered by the chat template with the assistant's generation prompt.

        `template_options` are keyword arguments of transformers' `apply_chat_template`: tools, documents, variables of
        the template. None: no arguments. Raises ChatTemplateError, and what `encode` raises.
        """
        if not self.has_chat_template:
            where = f" in {self._folder}" if self._folder else ""
            raise ChatTemplateError(f"the tokenizer{where} has no chat template: send a text or token ids")
        options = {"add_generation_prompt": True, **(template_options or {}), "tokenize": False}
        try:
            text = self._pretrained.apply_chat_template([_plain(message) for message in messages], **options)
        except Exception as error:  # a template is a program that may raise anything
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Make the detokenizer of one sequence that follows a prompt."""
        return Detokenizer(self._backend, prompt_token_ids, skip_special_tokens=skip_special_tokens)


def _plain(message: Message) -> dict[str, Any]:
    """Return a message with its content as one text if it is a list of texts, which most templates do not accept."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return dict(message)
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        raise ValueError("a message's content must be text or a list of text parts")
    return {**message, "content": "\n".join(part["text"] for part in content)}
