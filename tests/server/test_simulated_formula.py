import struct
import zlib

import pytest

from tokenwire_server.simulated_device.formula import (
    OutputSequence,
    TokenLogprobs,
    Vocabulary,
    expected_logprobs,
    expected_prompt_logprobs,
    expected_tokens,
    prompt_key,
)

VOCABULARY = 32_000


def test_the_key_is_the_crc_of_the_ids_as_little_endian_words() -> None:
    ids = [1, 70_000, 4_294_967_295]
    assert prompt_key(ids) == zlib.crc32(struct.pack("<3I", *ids))
    assert prompt_key(ids, seed=-5) == zlib.crc32(struct.pack("<3Iq", *ids, -5))


def test_the_tokens_are_those_of_the_documented_formula() -> None:
    key = prompt_key([5, 6, 7])
    expected = [8_000 + (key + 7_919 * index) % 16_000 for index in range(4)]
    assert expected_tokens([5, 6, 7], 4, vocab_size=VOCABULARY) == expected
    assert expected == [20_993, 12_912, 20_831, 12_750]


def test_prompt_order_and_seed_change_the_tokens() -> None:
    outputs = {
        tuple(expected_tokens(prompt, 3, vocab_size=VOCABULARY, seed=seed))
        for prompt in ([1, 2], [2, 1])
        for seed in (None, 0, 1)
    }
    assert len(outputs) == 6


def test_no_id_comes_twice_within_the_span() -> None:
    assert len(set(expected_tokens([1], 16_000, vocab_size=VOCABULARY))) == 16_000


def test_eos_ids_are_stepped_over() -> None:
    first = expected_tokens([1], 1, vocab_size=VOCABULARY)[0]
    eos = (first, first + 1)
    assert expected_tokens([1], 1, vocab_size=VOCABULARY, eos_token_ids=eos) == [first + 2]


def test_eos_comes_at_the_asked_length_and_not_before_min_tokens() -> None:
    def length(*, eos_after: int | None = None, min_tokens: int = 0) -> int:
        tokens = expected_tokens(
            [1], 50, vocab_size=VOCABULARY, eos_token_ids=(2, 3), eos_after=eos_after, min_tokens=min_tokens
        )
        assert (tokens[-1] == 2) == (eos_after is not None)
        return len(tokens)

    assert length() == 50
    assert length(eos_after=1) == 1
    assert length(eos_after=10) == 10
    assert length(eos_after=10, min_tokens=9) == 10
    assert length(eos_after=10, min_tokens=20) == 21


def test_with_ignore_eos_the_formula_goes_on_after_eos() -> None:
    plain = expected_tokens([1], 5, vocab_size=VOCABULARY)
    ignoring = expected_tokens([1], 5, vocab_size=VOCABULARY, eos_token_ids=(2,), eos_after=3, ignore_eos=True)
    assert ignoring == [*plain[:2], 2, *plain[3:]]


def test_stop_ids_end_the_output_and_are_stepped_over_before_min_tokens() -> None:
    plain = expected_tokens([1], 5, vocab_size=VOCABULARY)
    stops = {plain[1]}
    assert expected_tokens([1], 5, vocab_size=VOCABULARY, stop_token_ids=stops) == plain[:2]
    late = expected_tokens([1], 5, vocab_size=VOCABULARY, stop_token_ids=stops, min_tokens=2)
    assert late == [plain[0], plain[1] + 1, *plain[2:]]


def test_a_request_may_have_an_eos_of_its_own() -> None:
    vocabulary = Vocabulary(size=VOCABULARY, eos_token_ids=(2,))
    sequence = OutputSequence(vocabulary, [1], eos_after=2, eos_token_id=4)
    assert sequence.token(1) == 4


def test_a_vocabulary_of_eos_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="is too small for the formula"):
        Vocabulary(size=4, eos_token_ids=(1, 2))


def test_logprobs_follow_the_rank_which_goes_round() -> None:
    assert expected_logprobs([100, 100, 31_999], 2, vocab_size=VOCABULARY, first_index=0) == [
        TokenLogprobs(token_id=100, logprob=-0.75, rank=1, top=((100, -0.75), (101, -1.5))),
        TokenLogprobs(token_id=100, logprob=-1.5, rank=2, top=((99, -0.75), (100, -1.5))),
        TokenLogprobs(token_id=31_999, logprob=-2.25, rank=3, top=((31_997, -0.75), (31_998, -1.5))),
    ]
    assert expected_logprobs([31_999], 2, vocab_size=VOCABULARY)[0].top[1] == (0, -1.5)


def test_the_first_prompt_token_has_no_logprobs() -> None:
    entries = expected_prompt_logprobs([4, 5, 6], 1, vocab_size=VOCABULARY)
    assert [(entry.token_id, entry.rank, entry.top) for entry in entries] == [
        (5, 2, ((4, -0.75),)),
        (6, 3, ((4, -0.75),)),
    ]
