"""The state of one text request: its text so far, and its result."""

from collections.abc import Sequence

from tokenwire._errors import InternalError
from tokenwire._results import Delta, GenerateResult, Usage
from tokenwire._sequence import FinishReason, SequenceOutput
from tokenwire.text._assembler import TextAssembler
from tokenwire.text._result import TextResult


class TextRequest:
    """Collects the output of one request."""

    def __init__(self, prompt_token_ids: Sequence[int], assembler: TextAssembler) -> None:
        self._num_prompt_tokens = len(prompt_token_ids)
        self._assembler = assembler
        self._text: list[str] = []
        self._end: SequenceOutput | None = None
        self._usage: Usage | None = None

    @property
    def is_running_on(self) -> bool:
        """Whether a stop string has matched while the engine's request has not ended."""
        return self._assembler.matched is not None and self._usage is None

    def take(self, answer: Delta | GenerateResult) -> str:
        """Add a delta or a result and return the text to show."""
        text = ""
        for output in answer.outputs:
            is_stop = output.finish_reason is FinishReason.STOP
            text += self._assembler.push(output.token_ids, ends_with_stop_token=is_stop)
            if output.finish_reason is not None:
                self._end = output
                text += self._assembler.finish()
        if answer.usage is not None:
            self._usage = answer.usage
        self._text.append(text)
        return text

    def result(self, request_id: str) -> TextResult:
        """Return the result. Raises InternalError if neither the engine nor a stop string has ended the text."""
        usage, end = self._usage, self._end
        token_ids, stop_string = self._assembler.token_ids, self._assembler.matched
        text = "".join(self._text)
        if stop_string is not None:
            kept = Usage(
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=len(token_ids),
                cached_tokens=None if usage is None else usage.cached_tokens,
            )
            return TextResult(
                request_id=request_id,
                text=text,
                token_ids=token_ids,
                finish_reason=FinishReason.STOP,
                stop_reason=stop_string,
                usage=kept,
                overrun_tokens=None if usage is None else usage.completion_tokens - len(token_ids),
            )
        if end is None or end.finish_reason is None or usage is None:
            raise InternalError("the stream ended before the request")
        return TextResult(
            request_id=request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_token_id,
            usage=usage,
        )
