"""The output of the simulated device as a formula, so that a client can compute it in advance.

Tokens. Let V be the vocabulary size, `first` = V // 4 and `span` = V // 2: the ids are from the middle half of the
vocabulary, where special ids are rare. Let `key` be the CRC-32 of the prompt's ids, each as 4 bytes, little endian,
followed by the seed as 8 bytes (two's complement, little endian) if the request has one. Output token i, counted from 0, is

    first + (key + 7919 * i) % span

EOS ids of the model are skipped: the next higher id that is not an EOS id (modulo `span`) takes their place. While
i < min_tokens, the stop ids of the request are skipped too. With `eos_after` = N, output token max(N - 1, min_tokens) is
EOS: the tokenizer's if the server knows it, else the model's first.

No other sampling parameter changes a token; the formula is the result of sampling. Sequences of one request (n > 1) are
identical without a seed; with a seed they differ, because vLLM adds i to the seed of sequence i.

Log probabilities. The token at index i has the rank r(i) = 1 + i % 3, so with logprobs=1 it is often not the top token.
The id at rank q is (token + q - r(i)) % V, and rank q has the log probability -0.75 * q, which float32 represents
exactly. For prompt tokens, i is the position in the prompt, and position 0 has no entry.
"""

import array
import dataclasses
import itertools
import sys
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Final

STRIDE: Final = 7919
"""Distance between consecutive output tokens, in ids; a prime, so that ids repeat only after the whole span."""

RANKS: Final = 3
"""The ranks of consecutive tokens cycle from 1 to this number."""

LOGPROB_PER_RANK: Final = -0.75
"""Log probability of rank 1; that of rank q is q times as large."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The properties of the model that the formula depends on."""

    size: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if all(token in self.eos_token_ids for token in range(self.first, self.first + self.span)):
            raise ValueError(f"a vocabulary of {self.size} ids is too small for the formula")

    @property
    def first(self) -> int:
        """The lowest id that the formula uses."""
        return self.size // 4

    @property
    def span(self) -> int:
        """The number of ids that the formula uses, from `first` on."""
        return self.size // 2


class OutputSequence:
    """The output tokens of one sequence, by index."""

    __slots__ = ("_avoided", "_eos", "_eos_index", "_first", "_key", "_min_tokens", "_span", "_stops")

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_token_ids: Iterable[int],
        *,
        seed: int | None = None,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        eos_after: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        """Create the sequence of a request.

        Args:
            vocabulary: the ids that the formula uses.
            prompt_token_ids: the prompt.
            seed: the request's seed, to which vLLM has added the index of the sequence.
            min_tokens: number of output tokens before which no stop id occurs.
            stop_token_ids: the request's stop ids.
            eos_after: output length, EOS included, at which EOS occurs; None means never.
            eos_token_id: the tokenizer's EOS id; None means the model's first.

        """
        self._first = vocabulary.first
        self._span = vocabulary.span
        self._key = prompt_key(prompt_token_ids, seed=seed)
        self._avoided = frozenset((*vocabulary.eos_token_ids, *(() if eos_token_id is None else (eos_token_id,))))
        self._min_tokens = min_tokens
        self._stops = frozenset(stop_token_ids)
        self._eos = next(iter(vocabulary.eos_token_ids), None) if eos_token_id is None else eos_token_id
        self._eos_index = -1 if eos_after is None or self._eos is None else max(eos_after - 1, min_tokens)

    def token(self, index: int) -> int:
        """Return output token `index`, counted from 0."""
        if index == self._eos_index and self._eos is not None:
            return self._eos
        token = self._first + (self._key + STRIDE * index) % self._span
        if token in self._avoided or (index < self._min_tokens and token in self._stops):
            return self._next_allowed(token, index)
        return token

    def _next_allowed(self, token: int, index: int) -> int:
        stops = self._stops if index < self._min_tokens else frozenset()
        following = [self._first + (token - self._first + shift) % self._span for shift in range(1, self._span)]
        possible = [candidate for candidate in following if candidate not in self._avoided]
        return next((candidate for candidate in possible if candidate not in stops), possible[0] if possible else token)


def prompt_key(prompt_token_ids: Iterable[int], *, seed: int | None = None) -> int:
    """Return the formula's key for a prompt and a seed."""
    ids = array.array("I", prompt_token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    key = zlib.crc32(ids.tobytes())
    return key if seed is None else zlib.crc32((seed % 2**64).to_bytes(8, "little"), key)


def expected_tokens(
    prompt_token_ids: Sequence[int],
    count: int,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    seed: int | None = None,
    min_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
    eos_after: int | None = None,
    ignore_eos: bool = False,
) -> list[int]:
    """Return the output tokens of a request, up to and including an EOS or stop id.

    Args:
        prompt_token_ids: the prompt.
        count: the request's max_tokens.
        vocab_size: size of the vocabulary.
        eos_token_ids: EOS ids of the model's configuration; the first one occurs at `eos_after`.
        seed: the request's seed.
        min_tokens: the request's min_tokens.
        stop_token_ids: the request's stop ids.
        eos_after: the device's option of this name.
        ignore_eos: the request's ignore_eos.

    """
    sequence = OutputSequence(
        Vocabulary(size=vocab_size, eos_token_ids=tuple(eos_token_ids)),
        prompt_token_ids,
        seed=seed,
        min_tokens=min_tokens,
        stop_token_ids={*stop_token_ids, *eos_token_ids},
        eos_after=eos_after,
    )
    ends = {*stop_token_ids, *(() if ignore_eos else eos_token_ids)}
    tokens = [sequence.token(index) for index in range(count)]
    end = next((index for index, token in enumerate(tokens) if token in ends), count)
    return tokens[: end + 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The log probabilities of one token: its own, and the top k as (id, log probability), most likely first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def rank_at(index: int) -> int:
    """Return the rank of the token at an index of the output or of the prompt."""
    return 1 + index % RANKS


def expected_logprobs(
    token_ids: Iterable[int], top: int, *, vocab_size: int, first_index: int = 0
) -> list[TokenLogprobs]:
    """Return the log probabilities of output tokens.

    Args:
        token_ids: consecutive output tokens.
        top: number of top tokens per token.
        vocab_size: size of the vocabulary.
        first_index: index of the first token in the output.

    """
    return [
        TokenLogprobs(
            token_id=token,
            logprob=LOGPROB_PER_RANK * rank_at(index),
            rank=rank_at(index),
            top=tuple(
                ((token + rank - rank_at(index)) % vocab_size, LOGPROB_PER_RANK * rank) for rank in range(1, top + 1)
            ),
        )
        for index, token in enumerate(token_ids, first_index)
    ]


def expected_prompt_logprobs(prompt_token_ids: Iterable[int], top: int, *, vocab_size: int) -> list[TokenLogprobs]:
    """Return the log probabilities of the prompt tokens from the second one on; the first has none.

    Args:
        prompt_token_ids: the prompt.
        top: number of top tokens per token.
        vocab_size: size of the vocabulary.

    """
    rest = itertools.islice(prompt_token_ids, 1, None)
    return expected_logprobs(rest, top, vocab_size=vocab_size, first_index=1)
