"""Incremental detokenization of one sequence."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Number of prompt tokens that are decoded as context, so that the first token keeps its leading space.
_CONTEXT_TOKENS = 32

# tokenizers raises a bare Exception, whose message starts with this.
_NO_PREFIX = "Invalid prefix"


class Detokenizer:
    """Decodes one sequence incrementally, without ever returning an incomplete character.

    The concatenated results of `push` and `flush` equal the text of all tokens decoded at once, as far as that is
    possible without retracting text. With byte-level tokenizers it always is. Byte-fallback tokenizers (Llama 2,
    Mistral 7B) decode every byte in a run of byte tokens as U+FFFD if the run is not valid UTF-8 as a whole: characters
    that were complete at their last byte have been returned by then and stay, and the bytes after them become U+FFFD.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """Make the detokenizer of one sequence.

        Args:
            tokenizer: the tokenizer.
            prompt_token_ids: token ids of the prompt that the sequence follows.
            skip_special_tokens: whether special tokens are left out of the text.

        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        text = self._decode(context)
        if not text or text.endswith(_REPLACEMENT):
            # With an empty or incomplete context, DecodeStream would return the context's text together with later
            # tokens.
            context = []
        self._stream = DecodeStream(context, skip_special_tokens)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes; empty in the middle of a character."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith(_NO_PREFIX):
                raise
            # With this token, the tokenizer decodes returned bytes differently. Continue with the tokens not returned
            # yet.
            self._stream = DecodeStream([], self._skip_special_tokens)
            text = self._stream.step(self._tokenizer, self._held)
        if not text:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """Return the text still held back, with U+FFFD for an incomplete character, at the end of the sequence."""
        text = self._decode(self._held)
        self._held.clear()
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
