"""Text for token-based engines: chat template, tokenizer, incremental detokenization and stop strings.

    from tokenwire.text import TextClient

    async with tokenwire.AsyncClient("127.0.0.1:50051") as client:
        text = await TextClient.open(client, "MODEL_DIR")
        async with text.stream([{"role": "user", "content": "Count to ten."}], stop=["seven"]) as pieces:
            async for piece in pieces:
                print(piece, end="", flush=True)
        print(pieces.result.finish_reason, pieces.result.stop_reason)

Needs the extra: `pip install 'tokenwire[text]'`. Besides the client's own exceptions, it raises `TextError`.
"""

from tokenwire.text._assembler import TextAssembler
from tokenwire.text._carrier import Carrier, TokenStream
from tokenwire.text._client import Prompt, TextClient
from tokenwire.text._detokenizer import Detokenizer
from tokenwire.text._errors import ChatTemplateError, TextError, TokenizerError, TokenizerMismatchError
from tokenwire.text._options import CarrierOptions, TextOptions
from tokenwire.text._result import TextResult
from tokenwire.text._stop_matcher import StopMatcher
from tokenwire.text._stream import TextStream
from tokenwire.text._tokenizer import Message, TextTokenizer

__all__ = [
    "Carrier",
    "CarrierOptions",
    "ChatTemplateError",
    "Detokenizer",
    "Message",
    "Prompt",
    "StopMatcher",
    "TextAssembler",
    "TextClient",
    "TextError",
    "TextOptions",
    "TextResult",
    "TextStream",
    "TextTokenizer",
    "TokenStream",
    "TokenizerError",
    "TokenizerMismatchError",
]
