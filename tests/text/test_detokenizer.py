import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from harness.tokenizers import byte_fallback, byte_level
from tokenwire.text import Detokenizer

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
BYTE_FALLBACK_ZERO = BYTE_FALLBACK.get_vocab()["<0x00>"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

texts = st.text(st.characters(codec="utf-8"), max_size=40)
prompts = st.lists(st.integers(0, 399), max_size=40)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens: invalid UTF-8, special tokens, ids that the tokenizer does not have."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40)


def is_ascii_byte(token_id: int) -> bool:
    return 0 <= token_id - BYTE_FALLBACK_ZERO < 0x80


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [detokenizer.push(token_id) for token_id in token_ids]


@given(ids_of(BYTE_LEVEL), prompts, st.booleans())
def test_equals_a_full_decode_of_any_tokens(token_ids: list[int], prompt: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, prompt, skip_special_tokens=skip)
    pieces = pieces_of(detokenizer, token_ids)
    assert "".join(pieces) + detokenizer.flush() == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(texts.filter(lambda text: REPLACEMENT not in text))
def test_never_gives_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    detokenizer = Detokenizer(tokenizer)
    pieces = pieces_of(detokenizer, token_ids)
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert detokenizer.flush() == ""


# Without the byte tokens of ASCII letters, so that each letter has one token.
@given(
    ids_of(BYTE_FALLBACK).map(lambda ids: [number for number in ids if not is_ascii_byte(number)]),
    prompts.map(lambda ids: [number % 266 for number in ids]),
)
def test_byte_fallback_survives_any_tokens_and_loses_none(token_ids: list[int], prompt: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK, prompt)
    text = "".join(pieces_of(detokenizer, token_ids)) + detokenizer.flush()
    full = BYTE_FALLBACK.decode(token_ids)
    # Only characters that the full decode breaks because of later bytes may differ.
    assert [letter for letter in text if letter in "ab."] == [letter for letter in full if letter in "ab."]
    assert text.count(REPLACEMENT) <= full.count(REPLACEMENT)


def test_bytes_that_break_a_run_do_not_take_given_text_back() -> None:
    def byte(value: int) -> int:
        token_id = BYTE_FALLBACK.token_to_id(f"<0x{value:02X}>")
        assert token_id is not None
        return token_id

    letter = BYTE_FALLBACK.token_to_id("a")
    assert letter is not None
    detokenizer = Detokenizer(BYTE_FALLBACK)
    assert pieces_of(detokenizer, [letter, byte(0xC3), byte(0xA9)]) == ["a", "", "é"]
    assert pieces_of(detokenizer, [byte(0xFF), letter]) == ["", REPLACEMENT + "a"]


def test_a_first_token_keeps_its_space_after_a_prompt() -> None:
    the = BYTE_FALLBACK.token_to_id("▁the")
    assert the is not None
    assert Detokenizer(BYTE_FALLBACK).push(the) == "the"
    assert Detokenizer(BYTE_FALLBACK, [the] * 100).push(the) == " the"


def test_a_prompt_that_ends_in_half_a_character_is_not_given_again() -> None:
    prompt = BYTE_LEVEL.encode("Hello 🦊").ids[:-1]
    assert BYTE_LEVEL.decode(prompt).endswith(REPLACEMENT)
    assert Detokenizer(BYTE_LEVEL, prompt).push(BYTE_LEVEL.encode("a").ids[0]) == "a"


def test_a_last_half_character_comes_with_flush_alone() -> None:
    token_ids = BYTE_LEVEL.encode("x🦊").ids[:-1]
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert "".join(pieces_of(detokenizer, token_ids)) == "x"
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""
