"""Ends sequences at their stop strings.

The gateway matches stop strings in its own text too, but then still reads the request to its end and counts all of its
tokens: it relies on the engine to stop there.
"""

from collections.abc import Sequence
from typing import Any

from tokenwire.text import TextAssembler, TextTokenizer
from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server.errors import invalid_field

_MAX_STRINGS = 1024
_MAX_CHARACTERS = 65_536
"""Characters of all stop strings. They are matched on the event loop, where a million would delay all requests."""


def check(params: Any) -> None:
    """Check the stop strings of VllmEngine's sampling parameters.

    Raises:
        RequestError: INVALID_FIELD, a stop string is empty, or there are too many or too long ones.

    """
    if len(params.stop) > _MAX_STRINGS or sum(map(len, params.stop)) > _MAX_CHARACTERS:
        raise invalid_field(
            "sampling_params.stop",
            f"must contain at most {_MAX_STRINGS} strings and {_MAX_CHARACTERS} characters in total",
        )
    for position, stop in enumerate(params.stop):
        if not stop:
            raise invalid_field(f"sampling_params.stop[{position}]", "must not be empty")


class StopStrings:
    """Matches the stop strings of a request in the text of each of its sequences."""

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], params: Any) -> None:
        """Create a matcher for one request.

        Args:
            tokenizer: the tokenizer of the model.
            prompt_token_ids: the prompt.
            params: VllmEngine's sampling parameters.

        """
        self._tokenizer = tokenizer
        self._prompt = prompt_token_ids
        self._params = params
        self._assemblers: dict[int, TextAssembler] = {}

    def cut(self, output: pb.SequenceOutput) -> str | None:
        """Truncate an output after the token that completes a stop string, and set its finish reason to STOP.

        Returns:
            The stop string; None if no stop string is complete, in which case the output is unchanged.

        """
        assembler = self._assembler(output.index)
        before = len(assembler.token_ids)
        assembler.push(output.token_ids, ends_with_stop_token=output.finish_reason == pb.FINISH_REASON_STOP)
        if assembler.matched is None or output.finish_reason == pb.FINISH_REASON_ABORT:
            # An abort that has been reported stays one.
            return None
        _truncate(output, len(assembler.token_ids) - before)
        output.finish_reason = pb.FINISH_REASON_STOP
        output.ClearField("stop_token_id")
        return assembler.matched

    def _assembler(self, index: int) -> TextAssembler:
        found = self._assemblers.get(index)
        if found is None:
            params = self._params
            found = self._assemblers[index] = TextAssembler(
                self._tokenizer.detokenizer(self._prompt, skip_special_tokens=params.skip_special_tokens),
                params.stop,
                min_tokens=params.min_tokens,
                include_stop_str_in_output=params.include_stop_str_in_output,
            )
        return found


def _truncate(output: pb.SequenceOutput, length: int) -> None:
    del output.token_ids[length:]
    if output.HasField("logprobs"):
        columns = output.logprobs
        del columns.logprobs[length:], columns.ranks[length:]
        del columns.top_token_ids[length * columns.top_k :], columns.top_logprobs[length * columns.top_k :]
