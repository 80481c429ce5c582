"""A model's tokenizer and chat template, loaded from its folder."""

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
"""A message of a chat, in OpenAI's form: role, content and what else the template reads."""


class TextTokenizer:
    """Encodes prompts and messages, and makes detokenizers. Safe to use from several threads."""

    def __init__(self, pretrained: Any, folder: str = "") -> None:
        """Take a fast tokenizer of transformers."""
        self._pretrained = pretrained
        self._folder = folder
        self._backend: Tokenizer = pretrained.backend_tokenizer
        # Settings of the file that transformers too puts aside, and that concurrent calls must not change.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = max(self._backend.get_vocab().values(), default=-1) + 1
        """One more than the highest token id."""

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load from a model's folder, without network. Takes seconds: in async code, use a thread.

        Raises TokenizerError.
        """
        if not Path(folder).is_dir():
            raise TokenizerError(f"no tokenizer at {folder}: it is not a folder")
        # Seconds, and only here.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            pretrained = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever the file makes of transformers and tokenizers
            message = f"cannot load a tokenizer from {folder}: {type(error).__name__}: {' '.join(str(error).split())}"
            raise TokenizerError(message) from error
        if getattr(pretrained, "backend_tokenizer", None) is None:
            raise TokenizerError(f"the tokenizer in {folder} is of no kind that the tokenizers library can run")
        return cls(pretrained, str(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return self._pretrained.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Give the token ids of a plain prompt; by default with BOS and the like where the model has them.

        Raises InvalidArgumentError for half of a surrogate pair, which is no text.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise invalid(FieldViolation("prompt", "must be text that UTF-8 can hold")) from None

    def encode_chat(self, messages: Sequence[Message], template_options: Mapping[str, Any] | None = None) -> list[int]:
        """Give the token ids of a chat by the model's template, ready for the assistant's answer.

        The options are keyword arguments of transformers' `apply_chat_template`: tools, documents, variables of the
        template. Raises ChatTemplateError, and what `encode` raises.
        """
        if not self.has_chat_template:
            where = f" in {self._folder}" if self._folder else ""
            raise ChatTemplateError(f"the tokenizer{where} has no chat template: send a text or token ids")
        options = {"add_generation_prompt": True, **(template_options or {}), "tokenize": False}
        try:
            text = self._pretrained.apply_chat_template([_plain(message) for message in messages], **options)
        except Exception as error:  # templates are programs of the model's makers
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Give the text of token ids, all at once."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Make the detokenizer of one sequence after a prompt."""
        return Detokenizer(self._backend, prompt_token_ids, skip_special_tokens=skip_special_tokens)


def _plain(message: Message) -> dict[str, Any]:
    """Give a message with its content as one text, where it is a list of texts: what most templates know."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return dict(message)
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        raise ValueError("a message's content must be text or a list of text parts")
    return {**message, "content": "\n".join(part["text"] for part in content)}
