"""What `abort` says of each id."""

from enum import StrEnum

import msgspec

from tokenwire.v1 import engine_service_pb2 as pb


class AbortOutcome(StrEnum):
    """What became of an id in an abort: what the generating call itself was told."""

    ABORTED = "aborted"
    """The request's own last message says ABORT."""
    ALREADY_FINISHED = "already_finished"
    """The request had ended in another way before. Known for a while after its end."""
    NOT_FOUND = "not_found"
    """No request of that id is live or known."""
    REMEMBERED = "remembered"
    """No request of that id is live or known; one that arrives in time will end with ABORT."""
    UNKNOWN = "unknown"
    """An outcome that a later server has and this client does not know."""


_OUTCOMES: dict[int, AbortOutcome] = {
    pb.ABORT_OUTCOME_ABORTED: AbortOutcome.ABORTED,
    pb.ABORT_OUTCOME_ALREADY_FINISHED: AbortOutcome.ALREADY_FINISHED,
    pb.ABORT_OUTCOME_NOT_FOUND: AbortOutcome.NOT_FOUND,
    pb.ABORT_OUTCOME_REMEMBERED: AbortOutcome.REMEMBERED,
}


class AbortResult(msgspec.Struct, frozen=True):
    """What became of one id."""

    request_id: str
    """The id."""
    outcome: AbortOutcome
    """What became of it."""

    @classmethod
    def from_proto(cls, message: pb.AbortResult) -> "AbortResult":
        """Convert the contract's message."""
        return cls(message.request_id, _OUTCOMES.get(message.outcome, AbortOutcome.UNKNOWN))
