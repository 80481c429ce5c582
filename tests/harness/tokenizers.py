"""Small tokenizers of the two kinds that language models have, made in milliseconds."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, END = "<|start|>", "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The answer is: one, two, three!",
    "stop stopping the story at the end of the story; ENDE END ###",
    "Größe naïve coöperate — “quoted” … 東京 東京都 😀😀 👨\u200d👩\u200d👧 e\u0301",
]


def byte_level() -> Tokenizer:
    """Make a byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have: every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def byte_fallback(words: Sequence[str] = ("▁", "a", "b", "▁a", "▁the", "▁story", ".", "é")) -> Tokenizer:
    """Make a tokenizer with byte tokens for what it has no token for, as Llama 2 and Mistral 7B have."""
    tokens = ["<unk>", BOS, END, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", BOS, END])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def write_folder(
    folder: Path, *, tokenizer: Tokenizer | None = None, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write a tokenizer's folder, as a model has it."""
    pretrained = PreTrainedTokenizerFast(
        tokenizer_object=byte_level() if tokenizer is None else tokenizer, bos_token=BOS, eos_token=END
    )
    pretrained.chat_template = chat_template
    pretrained.save_pretrained(folder)
    return folder
