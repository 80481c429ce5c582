"""The sink of a call with one request: Generate and GenerateStream."""

import asyncio

from vllm.v1.outputs import LogprobsLists

from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1 import logprobs_pb2
from tokenwire_server.conversion.logprobs import LogprobColumns
from tokenwire_server.conversion.outputs import Chunk, RequestEnd, SequenceEnd, fill_sequence_end
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError


class CallSink(Sink):
    """Collects the outputs of a call's request and merges them until the call reads them."""

    __slots__ = (
        "_chunk",
        "_cumulative",
        "_discarded",
        "_error",
        "_fed",
        "_logprobs",
        "_request_end",
        "_sequence_end",
        "_stream",
        "_token_ids",
        "_top_ids",
        "_waiter",
    )

    def __init__(self, *, stream: bool) -> None:
        """Make a sink.

        Args:
            stream: whether the call reads outputs as they are generated, rather than all at once.

        """
        super().__init__()
        self._stream = stream
        self._token_ids: list[int] = []
        self._logprobs = LogprobColumns()
        self._top_ids = 0
        self._cumulative = 0.0
        self._fed = False
        self._sequence_end: SequenceEnd | None = None
        self._request_end: RequestEnd | None = None
        self._chunk: Chunk | None = None
        self._error: RequestError | None = None
        self._discarded: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, token_ids: list[int], logprobs: LogprobsLists | None) -> None:
        """Receive tokens on the direct path."""
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

    def end(self, sequence_end: SequenceEnd, request_end: RequestEnd) -> None:
        """Receive the end of the request on the direct path."""
        self._sequence_end = sequence_end
        self._request_end = request_end
        self._fed = True
        self._wake()

    def take(self, chunk: Chunk) -> None:
        """Receive an output on the ordinary path."""
        if self._chunk is None:
            self._chunk = chunk
        else:
            _merge(self._chunk, chunk)
        self._wake()

    def take_failure(self, error: RequestError) -> None:
        """Receive the failure of the request; outputs received before it are read first."""
        self._error = error
        self._wake()

    def waiting(self) -> int:
        """Return the number of values (token ids, log probabilities) not yet read."""
        chunk = self._chunk
        values = len(self._token_ids) + len(self._logprobs)
        if chunk is not None:
            values += sum(
                len(output.token_ids) + 2 * (len(output.logprobs.logprobs) + len(output.logprobs.top_logprobs))
                for output in chunk.outputs
            )
        return values

    def discard(self, error: RequestError) -> None:
        """Discard all unread outputs; the next read raises the error."""
        self._discarded = error
        self._token_ids = []
        self._logprobs = LogprobColumns()
        self._chunk = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Chunk:
        """Wait for the next output.

        Returns:
            The output. One with `request_end` is the last.

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
                    top_k=self._top_ids if columns.logprobs else self.num_top_tokens,
                    top_token_ids=columns.top_token_ids,
                    top_logprobs=columns.top_logprobs,
                    cumulative_logprob=self._cumulative,
                )
            )
        if self._sequence_end is not None:
            fill_sequence_end(message, self._sequence_end)
        return Chunk([message], self._request_end)


def _merge(pending: Chunk, chunk: Chunk) -> None:
    by_index = {output.index: output for output in pending.outputs}
    for output in chunk.outputs:
        before = by_index.get(output.index)
        if before is None:
            pending.outputs.append(output)
            continue
        # MergeFrom appends repeated fields, but replaces bytes.
        mask = before.sampling_mask.token_ids + output.sampling_mask.token_ids
        before.MergeFrom(output)
        if mask:
            before.sampling_mask.token_ids = mask
    if chunk.prompt_logprobs is not None:
        pending.prompt_logprobs = chunk.prompt_logprobs
    pending.request_end = chunk.request_end
