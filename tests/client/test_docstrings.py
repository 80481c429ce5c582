"""The docstrings of the client's parameters against the contract's comments: the same limits, the same defaults."""

import ast
import inspect
import itertools
import re
from pathlib import Path

import pytest

import tokenwire

PROTOS = Path(__file__).parents[2] / "protos/tokenwire/v1"

CLASSES = {
    tokenwire.SamplingParams: "SamplingParams",
    tokenwire.StructuredOutputsParams: "StructuredOutputsParams",
    tokenwire.RepetitionDetectionParams: "RepetitionDetectionParams",
    tokenwire.GenerationOptions: "GenerationInput",
}

DEFAULT_OF_CONTRACT = r"If (not set|empty)"
DEFAULT_OF_PYTHON = r"(-1 or )?None\b( or \S+)?: "

# Numbers that one side writes as a word, or in another sentence: "above zero", "the first row".
WORDS = {0.0, 1.0}


def comments_of(message: str) -> dict[str, str]:
    """Return the comment of each field of a message."""
    text = "".join(path.read_text() for path in sorted(PROTOS.glob("*.proto")))
    match = re.search(rf"^message {message} \{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    found, comment = {}, []
    for line in match[1].splitlines():
        if line.strip().startswith("//"):
            comment.append(line.strip().removeprefix("//").strip())
        else:
            if field := re.search(r"(\w+) = \d+;", line):
                found[field[1]] = " ".join(comment)
            comment = []
    return found


def docstrings_of(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a class."""
    [body] = [node.body for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


def numbers(text: str) -> set[float]:
    found = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?!\w)", text)
    return {float(number.replace(",", "")) for number in found}


def options(text: str) -> set[str]:
    """Return the command-line options that a description names."""
    return set(re.findall(r"--[a-z-]+[a-z]", text))


def default_of(text: str, start: str) -> str:
    """Return the part of a description that gives the default."""
    match = re.search(start, text)
    return "" if match is None else text[match.start() :]


FIELDS = [
    (cls, name) for cls, message in CLASSES.items() for name in docstrings_of(cls) if name in comments_of(message)
]


def test_the_contract_is_found() -> None:
    assert len(FIELDS) > 50
    assert all(docstrings_of(cls)[name] and comments_of(CLASSES[cls])[name] for cls, name in FIELDS)


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_a_docstring_agrees_with_the_contract(cls: type, name: str) -> None:
    """FAULTS D8."""
    docstring, comment = docstrings_of(cls)[name], comments_of(CLASSES[cls])[name]
    assert numbers(comment) <= numbers(docstring) | WORDS
    assert numbers(docstring) <= numbers(comment) | WORDS
    assert options(docstring) == options(comment)
    ours, theirs = default_of(docstring, DEFAULT_OF_PYTHON), default_of(comment, DEFAULT_OF_CONTRACT)
    # Fields of a oneof have no default of their own.
    assert bool(ours) == bool(theirs) or not theirs
    assert numbers(theirs) <= numbers(ours)
    assert ("generation_config" in ours) == ("generation_config" in theirs)
