"""Translates field paths in errors from GenerationInput to VllmEngine's request, which the caller sent."""

import contextlib
from collections.abc import Iterator

from tokenwire_server.errors import RequestError, Violation

_STRUCTURED = "input.sampling_params.structured_outputs"
_NAMES = (
    ("input.prompt_token_ids", "tokenized.input_ids"),
    ("input.reasoning_ended", "sampling_params.grammar_from_first_token"),
    (f"{_STRUCTURED}.json:", "sampling_params.json_schema:"),
    (f"{_STRUCTURED}.", "sampling_params."),
    (_STRUCTURED, "sampling_params.constraint"),
    ("input.", ""),
)
"""Prefixes of field paths and their names in VllmEngine; the first match applies."""


@contextlib.contextmanager
def renamed() -> Iterator[None]:
    """Translate the field paths of a RequestError raised in the block."""
    try:
        yield
    except RequestError as error:
        # In a message, a colon follows the path; the path itself has none.
        violations = [Violation(_rename(f"{field}:")[:-1], description) for field, description in error.violations]
        raise RequestError(error.reason, _rename(error.message), violations) from error


def _rename(text: str) -> str:
    for start, name in _NAMES:
        if text.startswith(start):
            return name + text.removeprefix(start)
    return text
