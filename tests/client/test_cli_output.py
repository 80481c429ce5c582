"""What sub-commands print: a table for people, aligned lines for programs."""

import contextlib
import io
import sys
from collections.abc import Iterator

import pytest

from tokenwire._cli import output

ROWS = [("model", "demo"), ("longest prompt", "2048")]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def screen() -> Iterator[Screen]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "60")
        patch.setenv("TERM", "dumb")
        shown = Screen()
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, shown)
        yield shown


def test_rows_are_a_table_with_a_title_on_a_terminal() -> None:
    with screen() as shown:
        output.print_rows("An engine", ROWS)
    lines = shown.getvalue().splitlines()
    assert lines[0].strip() == "An engine"
    assert max(map(len, lines)) <= 60
    for name, value in ROWS:
        [line] = [line for line in lines if name in line]
        assert value in line


def test_a_value_that_is_too_long_for_the_terminal_is_folded_and_not_cut() -> None:
    value = "/a/folder" * 20
    with screen() as shown:
        output.print_rows("An engine", [("path", value)])
    letters = "".join(character for character in shown.getvalue() if character.isalnum() or character == "/")
    assert letters == f"Anenginepath{value}"


def test_rows_are_aligned_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_rows("An engine", ROWS)
    assert capsys.readouterr().out == "model           demo\nlongest prompt  2048\n"


@pytest.mark.parametrize("text", ["3 tokens", "[bold]no markup[/bold]"])
def test_a_note_is_for_those_who_watch(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with screen() as shown:
        output.print_note(text)
    assert shown.getvalue() == f"{text}\n"
    output.print_note(text)
    assert capsys.readouterr() == ("", "")
