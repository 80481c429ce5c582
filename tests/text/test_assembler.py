"""The assembler returns the same text as vLLM's own detokenizer, independent of the chunks."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from harness.tokenizers import END, byte_fallback, byte_level
from tokenwire.text import Detokenizer, TextAssembler

BYTE_LEVEL = byte_level()
VOCABULARY = BYTE_LEVEL.get_vocab_size()
PROMPT = BYTE_LEVEL.encode("The answer").ids


class Sequence(NamedTuple):
    """What a model generates, and the options of the text."""

    token_ids: list[int]
    splits: list[int]
    stop: list[str]
    min_tokens: int
    include: bool
    is_stopped: bool

    def chunks(self) -> list[list[int]]:
        borders = sorted({0, len(self.token_ids), *(split % (len(self.token_ids) + 1) for split in self.splits)})
        return [self.token_ids[start:end] for start, end in pairwise(borders)]


@st.composite
def sequences(draw: Any) -> Sequence:
    words = st.sampled_from(["stop", " the", " story", "END", "###", "é", "😀", "東京", ".", "\n", "a"])
    written = st.lists(words, max_size=12).map(lambda parts: BYTE_LEVEL.encode("".join(parts)).ids)
    anything = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
    token_ids = draw(st.one_of(written, anything))
    text = BYTE_LEVEL.decode(token_ids)
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        stops.append(text[start : start + draw(st.integers(1, 6))] or "never")
    return Sequence(
        token_ids=token_ids,
        splits=draw(st.lists(st.integers(0, 100), max_size=8)),
        stop=stops,
        min_tokens=draw(st.integers(0, 8)),
        include=draw(st.booleans()),
        is_stopped=draw(st.booleans()),
    )


class Outcome(NamedTuple):
    text: str
    stop_string: str | None
    token_ids: list[int]


def assemble(tokenizer: Tokenizer, sequence: Sequence, chunks: list[list[int]]) -> tuple[Outcome, list[str], int]:
    assembler = TextAssembler(
        Detokenizer(tokenizer, PROMPT),
        sequence.stop,
        min_tokens=sequence.min_tokens,
        include_stop_str_in_output=sequence.include,
    )
    pieces = []
    for number, chunk in enumerate(chunks, 1):
        is_last = number == len(chunks)
        pieces.append(assembler.push(chunk, ends_with_stop_token=sequence.is_stopped and is_last))
    pieces.append(assembler.finish())
    outcome = Outcome("".join(pieces), assembler.matched, assembler.token_ids)
    return outcome, pieces, assembler.overrun_tokens


def by_vllm(sequence: Sequence) -> Outcome:
    params = SimpleNamespace(
        stop=sequence.stop,
        min_tokens=sequence.min_tokens,
        include_stop_str_in_output=sequence.include,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )
    request = SimpleNamespace(request_id="r", sampling_params=params, prompt_token_ids=PROMPT)
    detokenizer = FastIncrementalDetokenizer(PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL), request)
    stop_string = None
    for number, token_id in enumerate(sequence.token_ids, 1):
        is_last = number == len(sequence.token_ids)
        stop_string = detokenizer.update([token_id], stop_terminated=sequence.is_stopped and is_last)
        if stop_string is not None:
            break
    text = detokenizer.get_next_output_text(finished=True, delta=False)
    return Outcome(text, stop_string, list(detokenizer.output_token_ids))


@given(sequences())
def test_equals_vllm_whatever_the_chunks(sequence: Sequence) -> None:
    outcome, pieces, overrun = assemble(BYTE_LEVEL, sequence, sequence.chunks())
    assert outcome == by_vllm(sequence)
    assert len(outcome.token_ids) + overrun == len(sequence.token_ids)
    # No part of the stop string and no incomplete character was returned.
    assert all(outcome.text.startswith("".join(pieces[:number])) for number in range(len(pieces)))


@given(sequences(), st.integers(0, 3))
def test_chunks_make_no_difference(sequence: Sequence, size: int) -> None:
    whole, _, _ = assemble(BYTE_LEVEL, sequence, [sequence.token_ids])
    chunks = [sequence.token_ids[start : start + size + 1] for start in range(0, len(sequence.token_ids), size + 1)]
    assert assemble(BYTE_LEVEL, sequence, chunks)[0] == whole


@pytest.mark.parametrize(("include", "text"), [(False, "The"), (True, "The story")])
def test_the_stop_token_s_text_is_kept_where_asked_for(include: bool, text: str) -> None:
    tokenizer = byte_fallback(["The", "▁story"])
    token_ids = [number for token in ("The", "▁story") if (number := tokenizer.token_to_id(token)) is not None]
    assembler = TextAssembler(Detokenizer(tokenizer, token_ids), include_stop_str_in_output=include)
    assert assembler.push(token_ids, ends_with_stop_token=True) == text
    assert assembler.token_ids == token_ids


def test_eos_adds_no_text() -> None:
    end = BYTE_LEVEL.token_to_id(END)
    assert end is not None
    assembler = TextAssembler(Detokenizer(BYTE_LEVEL), include_stop_str_in_output=True)
    assert assembler.push([*BYTE_LEVEL.encode("a").ids, end], ends_with_stop_token=True) == "a"
