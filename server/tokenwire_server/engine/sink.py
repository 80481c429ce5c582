"""Where a request's outputs go.

vLLM gives each request a queue to put its outputs in; a `Sink` takes that queue's place. Outputs come in one of two
ways: on the direct path as the engine process sent them, through `feed` and `end`, and on the ordinary path as vLLM's
RequestOutput, through `put`, which also brings aborts and errors on both.
"""

import asyncio
import logging
from collections.abc import Sequence

from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, RequestStateStats
from vllm.v1.outputs import LogprobsLists

from tokenwire._contract import Reason
from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1 import logprobs_pb2
from tokenwire_server.conversion.exceptions import FAULTS, translate
from tokenwire_server.conversion.logprobs import LogprobColumns
from tokenwire_server.conversion.outputs import (
    Chunk,
    Closing,
    Ending,
    fill_ending,
    to_chunk,
    to_closing,
    to_ending,
)
from tokenwire_server.errors import RequestError, engine_dead

logger = logging.getLogger(__name__)


class Sink:
    """Takes the outputs of one request. A base class to fill in.

    No abc.ABC: the step path asks each request's queue whether it is a sink, which ABC makes ten times as slow.
    """

    __slots__ = ("_version_starts", "aborted", "direct", "internal_id", "num_tokens", "top_k")

    def __init__(self) -> None:
        self.internal_id = ""
        """The engine's own id of the request, unique for all time; set once it is in the engine."""
        self.direct = False
        """Whether outputs come on the direct path."""
        self.top_k: int | None = None
        """Number of further ids asked for each token, -1 for all; None where no log probabilities are."""
        self.num_tokens = 0
        """Tokens that came on the direct path."""
        self.aborted: bool | None = None
        """Whether the engine's last output says that the request was aborted; None before it."""
        self._version_starts: list[tuple[str, int]] = []

    def prepare(self, params: SamplingParams, *, direct: bool) -> None:
        """Say what the request asks for, before its first output."""
        self.direct = direct
        self.top_k = params.num_logprobs

    # The direct path

    def step(self, output: EngineCoreOutput, weight_version: str | None) -> None:
        """Take an output of the engine process that is not the last."""
        token_ids = output.new_token_ids
        if weight_version is not None and token_ids:
            starts = self._version_starts
            if not starts or starts[-1][0] != weight_version:
                starts.append((weight_version, self.num_tokens))
        self.num_tokens += len(token_ids)
        self.feed(token_ids, output.new_logprobs)

    def last_step(  # noqa: PLR0917  # on the step path, where keywords cost
        self,
        output: EngineCoreOutput,
        reason: FinishReason,
        stats: RequestStateStats | None,
        cached_tokens: int | None,
        speculation: RequestSpecDecodeMetrics | None,
        weight_version: str | None,
    ) -> None:
        """Take the last output of the engine process."""
        self.step(output, weight_version)
        try:
            ending = to_ending(reason, output.stop_reason, self._weight_versions(), speculation)
        except RequestError as error:
            self._end_in_error(error)
            return
        self.aborted = reason is FinishReason.ABORT
        closing = to_closing(stats, cached_tokens, output.kv_transfer_params, output.ec_transfer_params)
        self.end(ending, closing)

    def _weight_versions(self) -> Sequence[WeightVersionSpan]:
        starts = self._version_starts
        # One more than there are starts; the last span ends with the last token.
        ends = [start for _, start in starts[1:]] + [self.num_tokens]
        return [WeightVersionSpan(v, start, end) for (v, start), end in zip(starts, ends, strict=False)]

    # The ordinary path, aborts and errors

    def put(self, output: RequestOutput | Exception) -> None:
        """Take an output of vLLM's own OutputProcessor. Stands in for RequestOutputCollector.put.

        Never raises: an exception would end the server, or, from an abort, leave the request in the engine.
        """
        try:
            self._put(output)
        except RequestError as error:
            self._end_in_error(error)
        except Exception:
            logger.exception("could not pass on an output of request %s", self.internal_id)
            self._end_in_error(RequestError(Reason.INTERNAL, "internal error; the server's log has the cause"))

    def _put(self, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            # Any other exception is the end of vLLM's output handler, and so of the engine.
            raise translate(output, "input") if isinstance(output, FAULTS) else engine_dead()
        if output.finished:
            self.aborted = any(completion.finish_reason == "abort" for completion in output.outputs)
        if self.direct:
            # vLLM itself ends a request of the direct path only by an abort; the tokens so far came before.
            ending = Ending(pb.FINISH_REASON_ABORT, weight_versions=self._weight_versions())
            self.end(ending, to_closing(output.metrics, output.num_cached_tokens, None, None))
        else:
            self.take(to_chunk(output))

    def _end_in_error(self, error: RequestError) -> None:
        self.aborted = False
        self.fail(error)

    def feed(self, token_ids: list[int], logprobs: LogprobsLists | None) -> None:
        """Take tokens of the one sequence of a request on the direct path."""
        raise NotImplementedError

    def end(self, ending: Ending, closing: Closing) -> None:
        """Take the end of a request on the direct path."""
        raise NotImplementedError

    def take(self, chunk: Chunk) -> None:
        """Take an output of the ordinary path."""
        raise NotImplementedError

    def fail(self, error: RequestError) -> None:
        """Take the failure of the request: nothing follows."""
        raise NotImplementedError


class CallSink(Sink):
    """The outputs of a request with a call of its own, merged until they are read."""

    __slots__ = (
        "_chunk",
        "_closing",
        "_cumulative",
        "_discarded",
        "_ending",
        "_error",
        "_fed",
        "_logprobs",
        "_stream",
        "_token_ids",
        "_top_ids",
        "_waiter",
    )

    def __init__(self, *, stream: bool) -> None:
        """Make a sink.

        Args:
            stream: whether outputs are wanted as they come, rather than all together.

        """
        super().__init__()
        self._stream = stream
        self._token_ids: list[int] = []
        self._logprobs = LogprobColumns()
        self._top_ids = 0
        self._cumulative = 0.0
        self._fed = False
        self._ending: Ending | None = None
        self._closing: Closing | None = None
        self._chunk: Chunk | None = None
        self._error: RequestError | None = None
        self._discarded: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, token_ids: list[int], logprobs: LogprobsLists | None) -> None:
        """Take tokens of the direct path."""
        if self._token_ids:
            self._token_ids += token_ids
        else:
            self._token_ids = token_ids
        if logprobs is not None and self.top_k is not None:
            total, self._top_ids = self._logprobs.add(logprobs, self.top_k)
            self._cumulative += total
        if self._stream:
            self._fed = True
            self._wake()

    def end(self, ending: Ending, closing: Closing) -> None:
        """Take the end of the direct path."""
        self._ending = ending
        self._closing = closing
        self._fed = True
        self._wake()

    def take(self, chunk: Chunk) -> None:
        """Take an output of the ordinary path."""
        if self._chunk is None:
            self._chunk = chunk
        else:
            _merge(self._chunk, chunk)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Take a failure; what was not read yet is read before it."""
        self._error = error
        self._wake()

    def waiting(self) -> int:
        """Return the number of values that wait to be read."""
        chunk = self._chunk
        values = len(self._token_ids) + len(self._logprobs)
        if chunk is not None:
            values += sum(
                len(output.token_ids) + 2 * (len(output.logprobs.logprobs) + len(output.logprobs.top_logprobs))
                for output in chunk.outputs
            )
        return values

    def discard(self, error: RequestError) -> None:
        """Drop what waits and what still comes; the next read raises the error."""
        self._discarded = error
        self._token_ids = []
        self._logprobs = LogprobColumns()
        self._chunk = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Chunk:
        """Wait for the next output. After one with `closing` there is none.

        Raises:
            RequestError: the request has failed.

        """
        while True:
            if self._discarded is not None:
                raise self._discarded
            if self._fed:
                return self._take_fed()
            if self._chunk is not None:
                chunk, self._chunk = self._chunk, None
                return chunk
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _take_fed(self) -> Chunk:
        self._fed = False
        message = pb.SequenceOutput(token_ids=self._token_ids)
        self._token_ids = []
        if self.top_k is not None:
            columns, self._logprobs = self._logprobs, LogprobColumns()
            message.logprobs.CopyFrom(
                logprobs_pb2.Logprobs(
                    logprobs=columns.logprobs,
                    ranks=columns.ranks,
                    top_k=self._top_ids,
                    top_token_ids=columns.top_token_ids,
                    top_logprobs=columns.top_logprobs,
                    cumulative_logprob=self._cumulative,
                )
            )
        if self._ending is not None:
            fill_ending(message, self._ending)
        return Chunk([message], self._closing)


def _merge(pending: Chunk, chunk: Chunk) -> None:
    by_index = {output.index: output for output in pending.outputs}
    for output in chunk.outputs:
        before = by_index.get(output.index)
        if before is None:
            pending.outputs.append(output)
            continue
        # Everything repeated is appended, but bytes would be replaced.
        mask = before.sampling_mask.token_ids + output.sampling_mask.token_ids
        before.MergeFrom(output)
        if mask:
            before.sampling_mask.token_ids = mask
    if chunk.prompt_logprobs is not None:
        pending.prompt_logprobs = chunk.prompt_logprobs
    pending.closing = chunk.closing
