"""Converts the engine's outputs to VllmEngine's GenerateResponse messages."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as smg

from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1 import logprobs_pb2
from tokenwire_server.conversion.outputs import Chunk, RequestEnd
from tokenwire_server.services.smg.stop_strings import StopStrings

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}
"""Finish reasons by name; VllmEngine's requests cannot cause any others."""


@dataclasses.dataclass(slots=True)
class _Sequence:
    """The state of one sequence's responses."""

    gathered: pb.SequenceOutput
    """The sequence's output so far, if it is sent at its end."""
    num_tokens: int = 0
    begun: bool = False
    """Whether a message of the sequence has been sent."""
    finished: bool = False


class Answer:
    """Makes the responses of a request: chunks and completes if it streams, otherwise one complete per sequence."""

    def __init__(
        self,
        request: Any,
        num_sequences: int,
        stop_strings: StopStrings | None,
        cached_tokens: Callable[[int], int | None],
    ) -> None:
        """Make an answer.

        Args:
            request: VllmEngine's request.
            num_sequences: number of sequences of the request.
            stop_strings: detects the request's stop strings; None if it has none.
            cached_tokens: returns the number of cached prompt tokens of a running sequence, by its index; None if not
                known.

        """
        self._stream: bool = request.stream
        self._prompt: Sequence[int] = request.tokenized.input_ids
        self._stop_strings = stop_strings
        self._cached_tokens = cached_tokens
        self._prompt_logprobs: Any = None
        self._sequences = [_Sequence(pb.SequenceOutput(index=index)) for index in range(num_sequences)]

    @property
    def done(self) -> bool:
        """Whether all sequences have ended, possibly by stop strings, before the engine has ended the request."""
        return all(sequence.finished for sequence in self._sequences)

    def take(self, chunk: Chunk) -> Iterator[Any]:
        """Yield the responses for the next output of the engine."""
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = _input_logprobs(chunk.prompt_logprobs, self._prompt)
        for output in sorted(chunk.outputs, key=_index):
            sequence = self._sequences[output.index]
            if sequence.finished:
                continue
            matched = None if self._stop_strings is None else self._stop_strings.cut(output)
            sequence.num_tokens += len(output.token_ids)
            sequence.finished = output.finish_reason != pb.FINISH_REASON_UNSPECIFIED
            if not self._stream:
                sequence.gathered.MergeFrom(output)
            elif output.token_ids:
                yield self._chunk(output, sequence)
            if sequence.finished:
                yield self._complete(
                    output if self._stream else sequence.gathered, sequence, matched, chunk.request_end
                )

    def _chunk(self, output: pb.SequenceOutput, sequence: _Sequence) -> Any:
        message = smg.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(output.token_ids),
            index=output.index,
        )
        self._fill_logprobs(message, output, sequence)
        return smg.GenerateResponse(chunk=message)

    def _complete(
        self, output: pb.SequenceOutput, sequence: _Sequence, matched: str | None, request_end: RequestEnd | None
    ) -> Any:
        message = smg.GenerateComplete(
            finish_reason=_FINISH_REASONS[output.finish_reason],
            prompt_tokens=len(self._prompt),
            completion_tokens=sequence.num_tokens,
            index=output.index,
        )
        cached_tokens = self._cached_tokens(output.index) if request_end is None else request_end.cached_tokens
        if cached_tokens is not None:
            message.cached_tokens = cached_tokens
        if request_end is not None and request_end.kv_transfer_params_json is not None:
            message.kv_transfer_params_json = request_end.kv_transfer_params_json
        if matched is not None:
            message.matched_stop_str = matched
        elif output.HasField("stop_token_id"):
            message.matched_token_id = output.stop_token_id
        message.spec_accepted_tokens = output.speculative_decoding.num_accepted_tokens
        message.spec_draft_tokens = output.speculative_decoding.num_draft_tokens
        if not self._stream:
            message.output_ids.extend(output.token_ids)
            self._fill_logprobs(message, output, sequence)
        return smg.GenerateResponse(complete=message)

    def _fill_logprobs(self, message: Any, output: pb.SequenceOutput, sequence: _Sequence) -> None:
        if output.HasField("logprobs"):
            columns = output.logprobs
            message.output_logprobs.token_ids.extend(output.token_ids)
            message.output_logprobs.token_logprobs.extend(columns.logprobs)
            _fill_top(message.output_logprobs.top_logprobs, columns)
        if self._prompt_logprobs is not None and not sequence.begun:
            message.input_logprobs.CopyFrom(self._prompt_logprobs)
        sequence.begun = True


def _index(output: pb.SequenceOutput) -> int:
    return output.index


def _input_logprobs(columns: logprobs_pb2.PromptLogprobs, prompt: Iterable[int]) -> Any:
    message = smg.InputLogProbs(token_ids=prompt)
    # The first prompt token has no log probability.
    message.token_logprobs.add()
    for value in columns.logprobs:
        message.token_logprobs.add(value=value)
    if columns.top_k:
        message.top_logprobs.add()
        _fill_top(message.top_logprobs, columns)
    return message


def _fill_top(messages: Any, columns: logprobs_pb2.Logprobs | logprobs_pb2.PromptLogprobs) -> None:
    k = columns.top_k
    if k:
        for start in range(0, len(columns.top_token_ids), k):
            messages.add(
                values=columns.top_logprobs[start : start + k], token_ids=columns.top_token_ids[start : start + k]
            )
