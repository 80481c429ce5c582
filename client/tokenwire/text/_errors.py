"""What the text side raises of its own."""

from tokenwire._errors import TokenwireError


class TextError(TokenwireError):
    """The root of the text side's own errors."""


class TokenizerError(TextError):
    """A folder has no tokenizer that can be used."""


class TokenizerMismatchError(TextError):
    """The tokenizer has ids that the engine's vocabulary has not: it is another model's."""


class ChatTemplateError(TextError):
    """There is no chat template, or it refuses the messages."""
