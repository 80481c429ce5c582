"""The messages that a Multiplex stream has yet to send."""

import asyncio
from collections import deque
from collections.abc import Callable

from tokenwire.v1 import engine_service_pb2, error_pb2, logprobs_pb2
from tokenwire.v1 import multiplex_pb2 as pb
from tokenwire_server.errors import RequestError
from tokenwire_server.services.multiplex.columns import StepColumns
from tokenwire_server.services.multiplex.prompt_logprobs import VALUES_PER_PART, parts


class Pending:
    """Collects a stream's events into messages: one per engine step, or fewer and larger ones if the reader is slow."""

    def __init__(self, at_step_end: Callable[[Callable[[], None]], None]) -> None:
        """Make the stream's pending messages.

        Args:
            at_step_end: calls a callback once all outputs of the current engine step have been delivered.

        """
        self._at_step_end = at_step_end
        self.columns = StepColumns()
        self.marked = False
        """Whether a wake-up is scheduled or the sender has been woken."""
        self._parts: deque[pb.MultiplexPromptLogprobs] = deque()
        self._parts_left: dict[int, int] = {}
        self._held: dict[int, list[pb.MultiplexFinish]] = {}
        self._part_turn = False
        self._waiter: asyncio.Future[None] | None = None

    def mark(self) -> None:
        """Schedule a wake-up of the sender at the end of the current engine step."""
        if not self.marked:
            self.marked = True
            self._at_step_end(self.wake)

    def wake(self) -> None:
        """Wake the sender."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def finish(self, handle: int, finishes: list[pb.MultiplexFinish]) -> None:
        """Add ends of sequences; they are sent after the request's prompt log probabilities."""
        if handle in self._parts_left:
            self._held.setdefault(handle, []).extend(finishes)
        else:
            self.columns.finished += finishes
        self.mark()

    def reject(self, handle: int, error: RequestError) -> None:
        """Add the rejection of a submit or an abort."""
        self.columns.rejected.append(pb.MultiplexRejection(handle=handle, status=to_error_status(error)))
        self.mark()

    def fail(self, handle: int, error: RequestError) -> None:
        """Add the failure of a request; its unsent prompt log probabilities are discarded."""
        if self._parts_left.pop(handle, None):
            self._parts = deque(part for part in self._parts if part.handle != handle)
            self._held.pop(handle, None)
        self.columns.failed.append(pb.MultiplexFailure(handle=handle, status=to_error_status(error)))
        self.mark()

    def add_prompt_logprobs(self, handle: int, message: logprobs_pb2.PromptLogprobs) -> None:
        """Add a request's prompt log probabilities."""
        new = list(parts(handle, message))
        self._parts += new
        self._parts_left[handle] = self._parts_left.get(handle, 0) + len(new)
        self.mark()

    def waiting(self) -> int:
        """Return the number of values waiting to be sent."""
        # All parts of a request except the last one are full.
        return self.columns.waiting() + len(self._parts) * VALUES_PER_PART

    def clear(self) -> None:
        """Discard everything waiting to be sent."""
        self.columns = StepColumns()
        self._parts.clear()
        self._parts_left.clear()
        self._held.clear()

    def take(self) -> engine_service_pb2.MultiplexResponse | None:
        """Return the next message; None if there is nothing to send."""
        # Parts and steps alternate, so that neither delays the other.
        if self._parts and (self._part_turn or not self.columns):
            self._part_turn = False
            return engine_service_pb2.MultiplexResponse(prompt_logprobs=self._take_part())
        if not self.columns:
            self.marked = False
            return None
        self._part_turn = True
        columns, self.columns = self.columns, StepColumns()
        self.marked = bool(self._parts)
        return engine_service_pb2.MultiplexResponse(step=columns.to_message())

    def _take_part(self) -> pb.MultiplexPromptLogprobs:
        part = self._parts.popleft()
        self._parts_left[part.handle] -= 1
        if not self._parts_left[part.handle]:
            del self._parts_left[part.handle]
            self.columns.finished += self._held.pop(part.handle, [])
        return part

    async def wait(self) -> None:
        """Wait until there may be something to send."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


def to_error_status(error: RequestError) -> error_pb2.ErrorStatus:
    """Return the ErrorStatus that reports an error inside a stream."""
    number: int = error.code.value[0]
    status = error_pb2.ErrorStatus(code=number, reason=error.reason, message=error.message)
    for field, description in error.violations:
        status.field_violations.add(field=field, description=description)
    if (delay := error.retry_delay) is not None:
        status.retry_delay.FromNanoseconds(int(delay * 1e9))
    return status
