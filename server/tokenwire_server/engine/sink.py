"""The sink of a request's outputs.

A `Sink` replaces the queue that vLLM creates for each request's outputs. Outputs arrive on one of two paths: on the
direct path as the engine process sent them, through `step` and `last_step`; on the ordinary path as vLLM's
RequestOutput, through `put`, which also delivers aborts and errors on both paths.
"""

import logging
from collections.abc import Callable, Sequence

from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, RequestStateStats
from vllm.v1.outputs import LogprobsLists

from tokenwire._contract import Reason
from tokenwire.v1 import generation_pb2 as pb
from tokenwire_server.conversion.exceptions import FAULTS, translate
from tokenwire_server.conversion.outputs import (
    Chunk,
    RequestEnd,
    SequenceEnd,
    to_chunk,
    to_request_end,
    to_sequence_end,
)
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.errors import RequestError, engine_dead, internal_error

logger = logging.getLogger(__name__)


class Sink:
    """Receives the outputs of one request. A base class: subclasses implement `feed`, `end`, `take` and `take_failure`.

    Not an abc.ABC: the step path calls isinstance on each request's queue, which ABC makes ten times slower.
    """

    __slots__ = (
        "_abort",
        "_version_starts",
        "abort_reason",
        "aborted",
        "closed",
        "direct",
        "ended",
        "internal_id",
        "num_tokens",
        "num_top_tokens",
        "top_k",
    )

    def __init__(self) -> None:
        self.internal_id = ""
        """The engine's own id of the request, which is never reused; set once the request is in the engine."""
        self.direct = False
        """Whether outputs arrive on the direct path."""
        self.top_k: int | None = None
        """Number of top log probabilities requested per token, -1 for the whole vocabulary; None if not requested."""
        self.num_top_tokens = 0
        """Number of top tokens reported per token, also where there are no tokens to report it for."""
        self.num_tokens = 0
        """Number of tokens received on the direct path."""
        self.abort_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_ABORT
        """Finish reason to report when the engine aborts the request: TIME_LIMIT once its `max_time` has expired."""
        self.aborted = False
        """Whether a sequence was reported with finish reason ABORT."""
        self.ended = False
        """Whether the engine has ended the request, so that there is nothing to abort."""
        self.closed = False
        """Whether the request has ended for its caller; later outputs are discarded."""
        self._abort: Callable[[Sink], None] | None = None
        self._version_starts: list[tuple[str, int]] = []

    def prepare(self, request: EngineRequest, abort: Callable[["Sink"], None], *, direct: bool) -> None:
        """Prepare for a request's outputs.

        Args:
            request: the request.
            abort: aborts a sink's request in the engine, unless the engine has ended it; called when the request fails.
            direct: whether the outputs arrive on the direct path.

        """
        self._abort = abort
        self.direct = direct
        self.top_k = request.params.num_logprobs
        self.num_top_tokens = request.num_top_tokens

    # The direct path

    def step(self, output: EngineCoreOutput, weight_version: str | None) -> None:
        """Receive an output of the engine process."""
        if self.closed:
            return
        token_ids = output.new_token_ids
        if weight_version is not None and token_ids:
            starts = self._version_starts
            if not starts or starts[-1][0] != weight_version:
                starts.append((weight_version, self.num_tokens))
        self.num_tokens += len(token_ids)
        self.feed(token_ids, output.new_logprobs)

    def last_step(  # noqa: PLR0917  # keyword arguments are slower, on the step path
        self,
        output: EngineCoreOutput,
        reason: FinishReason,
        stats: RequestStateStats | None,
        cached_tokens: int | None,
        speculation: RequestSpecDecodeMetrics | None,
        weight_version: str | None,
    ) -> None:
        """Receive the last output of the engine process.

        Args:
            output: the output.
            reason: why the engine ended the request.
            stats: vLLM's timestamps of the request; None if statistics are disabled.
            cached_tokens: prompt tokens found in the prefix cache or fetched by a KV connector; None if not known.
            speculation: counts of speculative decoding; None if it is not enabled.
            weight_version: version of the weights in this step; None if the engine does not report versions.

        """
        self.ended = True
        if self.closed:
            return
        # vLLM 0.33 gives the cause of an error, such as a paused engine; 0.32 has no such field.
        if reason is FinishReason.ERROR and (error := getattr(output, "error", None)) is not None:
            self.put(error.to_exception())
            return
        self.step(output, weight_version)
        try:
            sequence_end = to_sequence_end(reason, output.stop_reason, self._weight_versions(), speculation)
        except RequestError as error:
            self.fail(error)
            return
        self._finish(
            sequence_end, to_request_end(stats, cached_tokens, output.kv_transfer_params, output.ec_transfer_params)
        )

    def _weight_versions(self) -> Sequence[WeightVersionSpan]:
        starts = self._version_starts
        # The last span ends with the last token. Without any starts there is one end too many.
        ends = [start for _, start in starts[1:]] + [self.num_tokens]
        return [WeightVersionSpan(v, start, end) for (v, start), end in zip(starts, ends, strict=False)]

    # The ordinary path, aborts and errors

    def put(self, output: RequestOutput | Exception) -> None:
        """Receive an output of vLLM's own OutputProcessor, in place of RequestOutputCollector.put.

        Never raises: an exception would shut down the server or, during an abort, leave the request in the engine.
        """
        try:
            self._put(output)
        except RequestError as error:
            self.fail(error)
        except Exception:
            logger.exception("could not deliver an output of request %s", self.internal_id)
            self.fail(internal_error())

    def _put(self, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            # Any other exception has ended vLLM's output handler, and so the engine.
            error = translate(output, "input") if isinstance(output, FAULTS) else engine_dead()
            self.ended = self.ended or error.reason == Reason.ENGINE_DEAD
            raise error
        self.ended = output.finished
        if self.closed:
            return
        if self.direct:
            # On the direct path vLLM itself ends a request only on abort; its tokens have already been delivered.
            sequence_end = SequenceEnd(pb.FINISH_REASON_ABORT, weight_versions=self._weight_versions())
            self._finish(sequence_end, to_request_end(output.metrics, output.num_cached_tokens, None, None))
            return
        chunk = to_chunk(output)
        for sequence in chunk.outputs:
            sequence.finish_reason = self._reported(sequence.finish_reason)
            if sequence.HasField("logprobs") and not sequence.logprobs.logprobs:
                # vLLM's columns do not show their width if they are empty.
                sequence.logprobs.top_k = self.num_top_tokens
        self.take(chunk)
        self.closed = output.finished

    def _finish(self, sequence_end: SequenceEnd, request_end: RequestEnd) -> None:
        sequence_end.reason = self._reported(sequence_end.reason)
        self.end(sequence_end, request_end)
        self.closed = True

    def _reported(self, reason: pb.FinishReason.ValueType) -> pb.FinishReason.ValueType:
        if reason == pb.FINISH_REASON_ABORT:
            reason = self.abort_reason
            self.aborted = self.aborted or reason == pb.FINISH_REASON_ABORT
        return reason

    def fail(self, error: RequestError) -> None:
        """Fail the request and abort it in the engine. Only the first failure is delivered, and nothing follows it."""
        if self.closed:
            return
        self.closed = True
        self.aborted = False
        if self._abort is not None:
            self._abort(self)
        self.take_failure(error)

    # For subclasses

    def feed(self, token_ids: list[int], logprobs: LogprobsLists | None) -> None:
        """Receive tokens on the direct path, where a request has one sequence."""
        raise NotImplementedError

    def end(self, sequence_end: SequenceEnd, request_end: RequestEnd) -> None:
        """Receive the end of the request on the direct path."""
        raise NotImplementedError

    def take(self, chunk: Chunk) -> None:
        """Receive an output on the ordinary path."""
        raise NotImplementedError

    def take_failure(self, error: RequestError) -> None:
        """Receive the failure of the request; nothing follows it."""
        raise NotImplementedError
