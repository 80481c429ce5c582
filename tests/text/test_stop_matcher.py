import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire.text import StopMatcher

# Few letters, so that stop strings overlap with the text, with each other and with themselves.
texts = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
pieces_lists = st.lists(st.tuples(st.text("ab", max_size=5), st.booleans()), max_size=12)


def first_match(text: str, stops: list[str], ends: list[bool]) -> tuple[int, str] | None:
    """Return where a stop string is complete first, by checking every position in turn."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if ends[end - 1] and text[:end].endswith(stop):
                return end, stop
    return None


@given(pieces_lists, stop_lists, st.booleans())
def test_finds_the_first_match_and_shows_what_is_before_it(
    pieces: list[tuple[str, bool]],
    stops: list[str],
    include: bool,
) -> None:
    matcher = StopMatcher(stops, include=include)
    shown = [matcher.push(piece, may_stop=may_stop) for piece, may_stop in pieces]
    whole = "".join(piece for piece, _ in pieces)
    match = first_match(whole, stops, [may_stop for piece, may_stop in pieces for _ in piece])
    if match is None:
        assert matcher.matched is None
        assert "".join(shown) + matcher.flush() == whole
    else:
        end, stop = match
        assert matcher.matched == stop
        assert "".join(shown) == whole[: end if include else end - len(stop)]
        assert matcher.flush() == ""


@given(texts, stop_lists)
def test_holds_back_exactly_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for position, letter in enumerate(text, 1):
        shown += matcher.push(letter)
        if matcher.matched is not None:
            return
        so_far = text[:position]
        starts = {stop[:size] for stop in stops for size in range(1, len(stop))}
        held = max((len(start) for start in starts if so_far.endswith(start)), default=0)
        assert shown == so_far[: position - held]


@given(texts)
def test_no_stop_strings_hold_nothing(text: str) -> None:
    matcher = StopMatcher([])
    assert matcher.push(text) == text
    assert matcher.flush() == ""


def test_a_stop_string_longer_than_the_text_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["ab" * 500])
    assert matcher.push("xabab") == "x"
    assert matcher.flush() == "abab"


def test_the_first_in_the_list_wins_at_one_end() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert matcher.push("xab") == "xa"
    assert matcher.matched == "b"


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.push("d") == ""
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
