"""Refusals name the fields of the request that was sent, not those of the GenerationInput that it became."""

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
"""Starts of paths, and what they are called in VllmEngine; the first that fits counts."""


@contextlib.contextmanager
def renamed() -> Iterator[None]:
    """Put VllmEngine's names into a RequestError that leaves the block."""
    try:
        yield
    except RequestError as error:
        # The colon, which ends a path in a message, is not in the path itself.
        violations = [Violation(_rename(f"{field}:")[:-1], description) for field, description in error.violations]
        raise RequestError(error.reason, _rename(error.message), violations) from error


def _rename(text: str) -> str:
    for start, name in _NAMES:
        if text.startswith(start):
            return name + text.removeprefix(start)
    return text
