"""The columns of a MultiplexStep, collected until the stream sends them."""

from collections.abc import Sequence

from vllm.v1.outputs import LogprobsLists

from tokenwire.v1 import generation_pb2, logprobs_pb2
from tokenwire.v1 import multiplex_pb2 as pb
from tokenwire_server.conversion.logprobs import LogprobColumns

_VALUES_PER_EVENT = 10
"""Values that an accepted, finished, rejected or failed event counts as: it takes about 600 bytes, a value 60."""


class StepColumns:
    """The tokens and events of a stream's requests since its last message."""

    __slots__ = (
        "_counts",
        "_handles",
        "_indexes",
        "_logprob_entries",
        "_logprobs",
        "_token_ids",
        "_top_ks",
        "accepted",
        "failed",
        "finished",
        "rejected",
    )

    def __init__(self) -> None:
        self._handles: list[int] = []
        # None while every entry has index 0, or one token.
        self._indexes: list[int] | None = None
        self._counts: list[int] | None = None
        self._token_ids: list[int] = []
        self._logprob_entries: list[int] = []
        self._top_ks: list[int] = []
        self._logprobs = LogprobColumns()
        self.finished: list[pb.MultiplexFinish] = []
        self.rejected: list[pb.MultiplexRejection] = []
        self.accepted: list[pb.MultiplexAccepted] = []
        self.failed: list[pb.MultiplexFailure] = []

    def waiting(self) -> int:
        """Return the number of values collected."""
        events = len(self.accepted) + len(self.finished) + len(self.rejected) + len(self.failed)
        return 2 * len(self._handles) + len(self._token_ids) + len(self._logprobs) + _VALUES_PER_EVENT * events

    def add(self, handle: int, token_ids: Sequence[int], index: int = 0) -> None:
        """Append an entry.

        Args:
            handle: handle of the request.
            token_ids: the new tokens of one sequence.
            index: index of the sequence in the request.

        """
        if self._indexes is not None:
            self._indexes.append(index)
        elif index:
            self._indexes = [*[0] * len(self._handles), index]
        count = len(token_ids)
        if self._counts is not None:
            self._counts.append(count)
        elif count != 1:
            self._counts = [*[1] * len(self._handles), count]
        self._handles.append(handle)
        self._token_ids += token_ids

    def add_logprobs(self, lists: LogprobsLists, top_k: int) -> float:
        """Append the engine's log probabilities for the last entry and return the sum over its sampled tokens."""
        total, width = self._logprobs.add(lists, top_k)
        self._logprob_entries.append(len(self._handles) - 1)
        self._top_ks.append(width)
        return total

    def add_converted_logprobs(self, message: logprobs_pb2.Logprobs) -> None:
        """Append log probabilities for the last entry that have already been converted."""
        columns = self._logprobs
        columns.logprobs += message.logprobs
        columns.ranks += message.ranks
        columns.top_token_ids += message.top_token_ids
        columns.top_logprobs += message.top_logprobs
        self._logprob_entries.append(len(self._handles) - 1)
        self._top_ks.append(message.top_k)

    def __bool__(self) -> bool:
        return bool(self._handles or self.finished or self.rejected or self.accepted or self.failed)

    def to_message(self) -> pb.MultiplexStep:
        """Return the message; the columns must not be used after this."""
        step = pb.MultiplexStep(
            handles=self._handles,
            indexes=self._indexes,
            token_counts=self._counts,
            token_ids=self._token_ids,
            finished=self.finished,
            rejected=self.rejected,
            accepted=self.accepted,
            failed=self.failed,
        )
        if entries := self._logprob_entries:
            columns = self._logprobs
            step.logprobs.CopyFrom(
                pb.MultiplexLogprobs(
                    entries=None if len(entries) == len(self._handles) else entries,
                    top_ks=self._top_ks,
                    logprobs=columns.logprobs,
                    ranks=columns.ranks,
                    top_token_ids=columns.top_token_ids,
                    top_logprobs=columns.top_logprobs,
                )
            )
        return step


def finish_of(handle: int, output: generation_pb2.SequenceOutput) -> pb.MultiplexFinish:
    """Convert a sequence's last output to a MultiplexFinish."""
    finish = pb.MultiplexFinish(
        handle=handle,
        index=output.index,
        finish_reason=output.finish_reason,
        weight_versions=output.weight_versions,
    )
    if output.HasField("stop_token_id"):
        finish.stop_token_id = output.stop_token_id
    if output.logprobs.HasField("cumulative_logprob"):
        finish.cumulative_logprob = output.logprobs.cumulative_logprob
    if output.HasField("routed_experts"):
        finish.routed_experts.CopyFrom(output.routed_experts)
    if output.HasField("speculative_decoding"):
        finish.speculative_decoding.CopyFrom(output.speculative_decoding)
    return finish
