"""The unread output of one request of a Multiplex stream."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from tokenwire._errors import TokenwireError
from tokenwire._logprobs import Logprobs, PromptLogprobs
from tokenwire._multiplex.backpressure import Backpressure
from tokenwire._multiplex.step import MultiplexFinish
from tokenwire._results import NO_USAGE, Delta, GenerateResult
from tokenwire._sequence import SequenceOutput
from tokenwire.v1.generation_pb2 import GenerationInput

# The fields that a finish shares with its sequence's output, and the last finish of a request with its last delta.
_SEQUENCE_FIELDS = [name for name in MultiplexFinish.__struct_fields__ if name in SequenceOutput.__struct_fields__]
_REQUEST_FIELDS = [name for name in MultiplexFinish.__struct_fields__ if name in Delta.__struct_fields__]


class MultiplexedSequence:
    """The unread output of one sequence."""

    __slots__ = ("finish", "index", "logprobs", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: Logprobs | None = None
        self.finish: MultiplexFinish | None = None

    def __bool__(self) -> bool:
        """Whether there is unread output."""
        return bool(self.token_ids) or self.finish is not None

    def add(self, token_ids: list[int], logprobs: Logprobs | None) -> None:
        """Add new tokens. Raises ValueError if `top_k` differs from the unread log probabilities'."""
        self.token_ids += token_ids
        held = self.logprobs
        if held is None or logprobs is None:
            self.logprobs = held or logprobs
            return
        if held.top_k != logprobs.top_k:
            raise ValueError("top_k of a sequence has changed")
        # The lists belong to this object alone.
        held.logprobs.extend(logprobs.logprobs)
        held.ranks.extend(logprobs.ranks)
        held.top_token_ids.extend(logprobs.top_token_ids)
        held.top_logprobs.extend(logprobs.top_logprobs)

    def take(self) -> SequenceOutput:
        """Return the unread output and clear it."""
        token_ids, self.token_ids = self.token_ids, []
        logprobs, self.logprobs = self.logprobs, None
        finish, self.finish = self.finish, None
        if finish is None:
            return SequenceOutput(index=self.index, token_ids=token_ids, logprobs=logprobs)
        logprobs = _with_cumulative(logprobs, finish.cumulative_logprob)
        return SequenceOutput(token_ids=token_ids, logprobs=logprobs, **_fields(finish, _SEQUENCE_FIELDS))


class MultiplexedRequest:
    """The unread output of one request. Nothing here runs per token, except while the reader waits."""

    __slots__ = (
        "_backpressure",
        "_end_waiter",
        "_error",
        "_is_plain",
        "_is_whole",
        "_last",
        "_loop",
        "_parts",
        "_parts_missing",
        "_prompt_length",
        "_prompt_token_ids",
        "_sequences",
        "first",
        "handle",
        "has_ended",
        "request_id",
        "waiter",
    )

    def __init__(self, message: GenerationInput, backpressure: Backpressure) -> None:
        self.handle = 0
        """The request's handle, set when it is submitted."""
        self.request_id = message.request_id
        self.first = MultiplexedSequence(0)
        """The sequence with index 0."""
        self.waiter: asyncio.Future[None] | None = None
        """The future that the reader awaits; None if it does not wait. `wake` completes it."""
        self.has_ended = False
        """Whether the request has ended: nothing more arrives."""
        self._sequences = {0: self.first}
        self._backpressure = backpressure
        self._loop = asyncio.get_running_loop()
        self._end_waiter: asyncio.Future[None] | None = None
        self._error: Callable[[], TokenwireError] | None = None
        self._last: MultiplexFinish | None = None
        self._is_whole = True
        self._is_plain = False
        self._prompt_length = len(message.prompt_token_ids)
        # Multiplex has no field for the prompt: the client has it already.
        self._prompt_token_ids = list(message.prompt_token_ids) if message.return_prompt_token_ids else None
        self._parts: list[PromptLogprobs] = []
        params = message.sampling_params
        self._parts_missing = params.HasField("prompt_logprobs") or params.HasField("prompt_logprob_token_ids")

    @property
    def is_whole(self) -> bool:
        """Whether nothing has been read yet."""
        return self._is_whole

    @property
    def num_unread(self) -> int:
        """Number of unread tokens and prompt positions."""
        tokens = sum(len(sequence.token_ids) for sequence in self._sequences.values())
        return tokens + sum(len(part.logprobs) for part in self._parts)

    def sequence(self, index: int) -> MultiplexedSequence:
        """Return a sequence."""
        sequence = self._sequences.get(index)
        if sequence is None:
            sequence = self._sequences[index] = MultiplexedSequence(index)
            self._is_plain = False
        return sequence

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Add a part of the prompt log probabilities."""
        self._parts.append(part)
        # The scores of requested token ids arrive with the last part, without a length to check.
        if part.token_id_logprobs or part.offset + len(part.logprobs) >= self._prompt_length:
            self._parts_missing = False
            self.wake()

    def finish(self, finish: MultiplexFinish) -> None:
        """Add the finish of a sequence."""
        self.sequence(finish.index).finish = finish
        if finish.last:
            self._last = finish
            self._end()
        self.wake()

    def fail(self, error: Callable[[], TokenwireError]) -> None:
        """End the request with an error."""
        self._error = error
        self._end()

    def drop(self) -> None:
        """Drop the unread output and end a reader's wait."""
        self._backpressure.tokens_read(self.num_unread)
        self._sequences = {0: MultiplexedSequence(0)}
        self.first = self._sequences[0]
        self._parts.clear()
        self._error = None
        self._is_whole = False
        self._end()

    def take_error(self) -> TokenwireError | None:
        """Return the error that ended the request, once."""
        error, self._error = self._error, None
        return None if error is None else error()

    def error(self) -> TokenwireError | None:
        """Return the error that ended the request; None without an error."""
        return None if self._error is None else self._error()

    def take_delta(self) -> Delta | None:
        """Return the unread output; None if there is none. The first delta waits for all prompt log probabilities."""
        first = self.first
        if self._is_plain and first.finish is None and first.logprobs is None:
            # Most deltas have only tokens.
            token_ids = first.token_ids
            if not token_ids:
                return None
            first.token_ids = []
            self._backpressure.tokens_read(len(token_ids))
            return Delta(request_id=self.request_id, outputs=[SequenceOutput(index=0, token_ids=token_ids)])
        if (self._parts_missing and not self.has_ended) or not any(self._sequences.values()):
            return None
        return Delta(**self._take())

    def take_result(self) -> GenerateResult:
        """Return the whole output of a request that has ended without an error."""
        fields = self._take()
        fields["usage"] = fields.get("usage") or NO_USAGE
        return GenerateResult(**fields)

    def readable(self) -> asyncio.Future[None]:
        """Return a future that completes when there may be unread output. A caller that stops waiting calls `drop`."""
        waiter = self.waiter = self._wait()
        return waiter

    def ended(self) -> asyncio.Future[None]:
        """Return a future that completes when the request has ended. A caller that stops waiting calls `drop`."""
        waiter = self._end_waiter = self._wait()
        return waiter

    def wake(self) -> None:
        """Wake a waiting reader."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            # Not in the reader's task, which runs later: from here on the reader does not wait.
            self._backpressure.reader_resumes()
            if not waiter.done():  # it may have been cancelled
                waiter.set_result(None)

    def _wait(self) -> asyncio.Future[None]:
        if self.waiter is not None or self._end_waiter is not None:
            raise RuntimeError("another task is reading this stream")
        self._backpressure.reader_waits()
        return self._loop.create_future()

    def _end(self) -> None:
        self.has_ended = True
        if self._end_waiter is not None:
            self.waiter, self._end_waiter = self._end_waiter, None
        self.wake()

    def _take(self) -> dict[str, Any]:
        """Return the unread fields of a delta or a result and clear them."""
        self._backpressure.tokens_read(self.num_unread)
        parts, self._parts = self._parts, []
        prompt_token_ids, self._prompt_token_ids = self._prompt_token_ids, None
        self._is_whole = False
        # After this, a request with one sequence has only tokens and log probabilities until its finish.
        self._is_plain = len(self._sequences) == 1
        return {
            "request_id": self.request_id,
            "outputs": [sequence.take() for _, sequence in sorted(self._sequences.items()) if sequence],
            "prompt_logprobs": _merged(parts) if parts else None,
            "prompt_token_ids": prompt_token_ids,
            **({} if self._last is None else _fields(self._last, _REQUEST_FIELDS)),
        }


def _fields(finish: MultiplexFinish, names: list[str]) -> dict[str, Any]:
    return {name: getattr(finish, name) for name in names}


def _with_cumulative(logprobs: Logprobs | None, cumulative_logprob: float | None) -> Logprobs | None:
    if cumulative_logprob is None:
        return logprobs
    logprobs = logprobs or Logprobs(logprobs=[], ranks=[], top_token_ids=[], top_logprobs=[])
    return msgspec.structs.replace(logprobs, cumulative_logprob=cumulative_logprob)


def _merged(parts: list[PromptLogprobs]) -> PromptLogprobs:
    parts = sorted(parts, key=lambda part: part.offset)
    return PromptLogprobs(
        offset=parts[0].offset,
        logprobs=[value for part in parts for value in part.logprobs],
        ranks=[value for part in parts for value in part.ranks],
        top_k=parts[0].top_k,
        top_token_ids=[value for part in parts for value in part.top_token_ids],
        top_logprobs=[value for part in parts for value in part.top_logprobs],
        token_id_logprobs=[value for part in parts for value in part.token_id_logprobs],
    )
