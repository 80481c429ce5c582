"""The sink of one request of a Multiplex stream."""

from collections.abc import Callable

from vllm.v1.outputs import LogprobsLists

from tokenwire.v1 import generation_pb2
from tokenwire.v1 import multiplex_pb2 as pb
from tokenwire_server.conversion.outputs import Chunk, RequestEnd, SequenceEnd, fill_request_end, fill_sequence_end
from tokenwire_server.conversion.request import EngineRequest
from tokenwire_server.engine.sink import Sink
from tokenwire_server.errors import RequestError
from tokenwire_server.services.multiplex.columns import finish_of
from tokenwire_server.services.multiplex.pending import Pending


class HandleSink(Sink):
    """Adds the outputs of one handle to its stream's columns."""

    __slots__ = (
        "_accepted",
        "_completion_tokens",
        "_cumulative",
        "_masks",
        "_on_end",
        "_pending",
        "_prompt_reported",
        "_prompt_tokens",
        "handle",
        "request_id",
    )

    def __init__(self, handle: int, pending: Pending, on_end: Callable[["HandleSink"], None]) -> None:
        """Make the sink of a handle.

        Args:
            handle: the handle.
            pending: the messages that the stream has yet to send.
            on_end: called when the request ends or fails, before that is added to `pending`.

        """
        super().__init__()
        self.handle = handle
        self.request_id = ""
        """The request's id; "" before the request is converted."""
        self._prompt_tokens = 0
        self._pending = pending
        self._on_end = on_end
        self._accepted = False
        self._completion_tokens = 0
        self._cumulative = 0.0
        self._prompt_reported = False
        self._masks: dict[int, generation_pb2.SamplingMask] = {}

    def prepare(self, request: EngineRequest, abort: Callable[[Sink], None], *, direct: bool) -> None:
        """Prepare for the request's outputs.

        Args:
            request: the request.
            abort: aborts a sink's request in the engine, unless the engine has ended it.
            direct: whether the outputs arrive on the direct path.

        """
        super().prepare(request, abort, direct=direct)
        self._set_request(request)

    def _set_request(self, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self._prompt_tokens = len(request.prompt_token_ids)

    def accept(self) -> None:
        """Report that the request was admitted, unless this has been reported."""
        if not self._accepted:
            self._accepted = True
            accepted = pb.MultiplexAccepted(handle=self.handle, request_id=self.request_id)
            self._pending.columns.accepted.append(accepted)
            self._pending.mark()

    def feed(self, token_ids: list[int], logprobs: LogprobsLists | None) -> None:
        """Receive tokens on the direct path."""
        if not self._accepted:
            self.accept()
        if token_ids:
            pending = self._pending
            pending.columns.add(self.handle, token_ids)
            if logprobs is not None and self.top_k is not None:
                self._cumulative += pending.columns.add_logprobs(logprobs, self.top_k)
            if not pending.marked:
                pending.mark()

    def end(self, sequence_end: SequenceEnd, request_end: RequestEnd) -> None:
        """Receive the end of the request on the direct path."""
        finish = pb.MultiplexFinish(handle=self.handle)
        fill_sequence_end(finish, sequence_end)
        if self.top_k is not None:
            finish.cumulative_logprob = self._cumulative
        self._completion_tokens = self.num_tokens
        self._close([finish], request_end)

    def take(self, chunk: Chunk) -> None:
        """Receive an output on the ordinary path."""
        self.accept()
        pending = self._pending
        # With n > 1 the engine reports the same prompt once per sequence.
        if chunk.prompt_logprobs is not None and not self._prompt_reported:
            self._prompt_reported = True
            pending.add_prompt_logprobs(self.handle, chunk.prompt_logprobs)
        finishes = []
        for output in chunk.outputs:
            if output.token_ids:
                self._completion_tokens += len(output.token_ids)
                pending.columns.add(self.handle, output.token_ids, output.index)
                if output.HasField("logprobs"):
                    pending.columns.add_converted_logprobs(output.logprobs)
            if output.HasField("sampling_mask"):
                mask = self._masks.setdefault(output.index, generation_pb2.SamplingMask())
                mask.counts.extend(output.sampling_mask.counts)
                mask.token_ids += output.sampling_mask.token_ids
            if output.finish_reason:
                finish = finish_of(self.handle, output)
                if output.index in self._masks:
                    finish.sampling_mask.CopyFrom(self._masks.pop(output.index))
                finishes.append(finish)
        if chunk.request_end is not None:
            self._close(finishes, chunk.request_end)
        elif finishes:
            pending.finish(self.handle, finishes)
        pending.mark()

    def end_on_arrival(self, request: EngineRequest) -> None:
        """End a request whose id an earlier Abort asked to remember."""
        self._set_request(request)
        self.accept()
        finishes = [
            pb.MultiplexFinish(handle=self.handle, index=i, finish_reason=generation_pb2.FINISH_REASON_ABORT)
            for i in range(request.params.n)
        ]
        self._close(finishes, RequestEnd())

    def take_failure(self, error: RequestError) -> None:
        """Receive the failure of the request."""
        self._on_end(self)
        self._pending.fail(self.handle, error)

    def _close(self, finishes: list[pb.MultiplexFinish], request_end: RequestEnd) -> None:
        last = finishes[-1]
        last.last = True
        fill_request_end(last, request_end, self._prompt_tokens, self._completion_tokens)
        self._on_end(self)
        self._pending.finish(self.handle, finishes)
