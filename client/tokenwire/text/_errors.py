"""Exceptions of `tokenwire.text`."""

from tokenwire._errors import TokenwireError


class TextError(TokenwireError):
    """Base class of the exceptions of `tokenwire.text`."""


class TokenizerError(TextError):
    """The folder has no usable tokenizer."""


class TokenizerMismatchError(TextError):
    """The tokenizer has ids beyond the engine's vocabulary: it belongs to another model."""


class ChatTemplateError(TextError):
    """The tokenizer has no chat template, or it refuses the messages."""
