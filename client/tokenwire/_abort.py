"""The result of `abort` for each request id."""

from enum import StrEnum

import msgspec

from tokenwire.v1 import engine_service_pb2 as pb


class AbortOutcome(StrEnum):
    """The outcome of an abort for one id. It agrees with the finish reason that the generating call reports."""

    ABORTED = "aborted"
    """The request ends with the finish reason ABORT."""
    ALREADY_FINISHED = "already_finished"
    """The request had finished in another way. Finished ids are kept for a limited time."""
    NOT_FOUND = "not_found"
    """No live or recently finished request has this id."""
    REMEMBERED = "remembered"
    """No live or recently finished request has this id; a request with this id that arrives in time ends with ABORT."""
    UNKNOWN = "unknown"
    """The server is newer than this client and returned an outcome that the client does not know."""


_OUTCOMES: dict[int, AbortOutcome] = {
    pb.ABORT_OUTCOME_ABORTED: AbortOutcome.ABORTED,
    pb.ABORT_OUTCOME_ALREADY_FINISHED: AbortOutcome.ALREADY_FINISHED,
    pb.ABORT_OUTCOME_NOT_FOUND: AbortOutcome.NOT_FOUND,
    pb.ABORT_OUTCOME_REMEMBERED: AbortOutcome.REMEMBERED,
}


class AbortResult(msgspec.Struct, frozen=True):
    """The outcome for one id."""

    request_id: str
    """The request's id."""
    outcome: AbortOutcome
    """What happened to the request."""

    @classmethod
    def from_proto(cls, message: pb.AbortResult) -> "AbortResult":
        """Convert from the protobuf message."""
        return cls(message.request_id, _OUTCOMES.get(message.outcome, AbortOutcome.UNKNOWN))
