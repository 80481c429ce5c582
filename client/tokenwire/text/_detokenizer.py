"""From token ids to text, one token at a time."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Tokens of the prompt that are decoded along, so that a first token keeps its leading space.
_CONTEXT_TOKENS = 32

# The start of the message of the bare Exception that tokenizers raises.
_NO_PREFIX = "Invalid prefix"


class Detokenizer:
    """Decodes one sequence incrementally; never gives half a character.

    What all `push` give and `flush` add up to what the tokenizer makes of all tokens at once, where that is possible
    without taking text back. It is with byte-level tokenizers, for whatever tokens. Byte-fallback tokenizers (Llama 2,
    Mistral 7B) make U+FFFD of every byte in a run of byte tokens if the run breaks UTF-8 anywhere; characters that were
    whole when their last byte came have been given by then and stay, the bytes after them become U+FFFD.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        text = self._decode(context)
        if not text or text.endswith(_REPLACEMENT):
            # Without text, or in half a character, DecodeStream would give what the context becomes with later tokens.
            context = []
        self._stream = DecodeStream(context, skip_special_tokens)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Take a token and give the text that is certain with it; empty in the middle of a character."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith(_NO_PREFIX):
                raise
            # With this token the tokenizer reads given bytes differently. Go on with what was not given.
            self._stream = DecodeStream([], self._skip_special_tokens)
            text = self._stream.step(self._tokenizer, self._held)
        if not text:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """Give what is still held as the tokenizer decodes it: U+FFFD for an incomplete character. Ends the sequence."""
        text = self._decode(self._held)
        self._held.clear()
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
