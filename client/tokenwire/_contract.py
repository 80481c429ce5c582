"""The part of the contract that the proto files cannot express: its revision, the error domain and the reasons.

Shared by the client and the server, so that each reason is spelled once.
"""

from enum import StrEnum

CONTRACT_REVISION = 2
"""Revision of `protos/` that this package was built from, incremented with every change. The server reports its own in
`EngineInfo.contract_revision`."""

ERROR_DOMAIN = "tokenwire.v1"
"""The `domain` of every `google.rpc.ErrorInfo` from a tokenwire server."""


class Reason(StrEnum):
    """Why a call failed, for programs to branch on: `google.rpc.ErrorInfo.reason`. Each comes with one status code."""

    INVALID_FIELD = "INVALID_FIELD"
    """A field's value is invalid; the field violations name it. INVALID_ARGUMENT."""
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    """The server has no model or adapter with that name. NOT_FOUND."""
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    """A live request already has that id. ALREADY_EXISTS."""
    TOKENIZER_REQUIRED = "TOKENIZER_REQUIRED"
    """The server was not started with --keep-tokenizer. FAILED_PRECONDITION."""
    ENGINE_ASLEEP = "ENGINE_ASLEEP"
    """The engine is asleep. FAILED_PRECONDITION."""
    UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD"
    """The server or its engine does not support a field that is set. UNIMPLEMENTED."""
    UNSUPPORTED_METHOD = "UNSUPPORTED_METHOD"
    """The server does not implement that method. UNIMPLEMENTED."""
    ENGINE_LOADING = "ENGINE_LOADING"
    """The engine is still loading the model. UNAVAILABLE, worth retrying."""
    QUEUE_FULL = "QUEUE_FULL"
    """The maximum number of unfinished requests of the engine, a stream or a caller is reached. UNAVAILABLE, worth
    retrying."""
    QUEUED_TOKENS_LIMIT = "QUEUED_TOKENS_LIMIT"
    """The engine's maximum number of queued prompt tokens is reached. UNAVAILABLE, worth retrying."""
    ENGINE_PAUSED = "ENGINE_PAUSED"
    """The engine is paused and accepts no requests. UNAVAILABLE, worth retrying."""
    DRAINING = "DRAINING"
    """The server is shutting down. UNAVAILABLE; retry on another server."""
    ENGINE_DEAD = "ENGINE_DEAD"
    """The engine has died. UNAVAILABLE; retry on another server."""
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    """The response would exceed the maximum message size. RESOURCE_EXHAUSTED."""
    SLOW_READER = "SLOW_READER"
    """The caller did not read from its stream for too long. RESOURCE_EXHAUSTED."""
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    """The call's deadline has passed. DEADLINE_EXCEEDED."""
    REQUEST_FAILED = "REQUEST_FAILED"
    """The engine failed this request; other requests are not affected. INTERNAL."""
    INTERNAL = "INTERNAL"
    """A bug in the server, whose log has the cause. INTERNAL."""
    UNAUTHENTICATED = "UNAUTHENTICATED"
    """The credential is missing or wrong. UNAUTHENTICATED."""
    PERMISSION_DENIED = "PERMISSION_DENIED"
    """The credential does not allow this. PERMISSION_DENIED."""
    HANDLE_IN_USE = "HANDLE_IN_USE"
    """A live request of the Multiplex stream already has that handle. ALREADY_EXISTS, as an event of the stream."""
    UNKNOWN_HANDLE = "UNKNOWN_HANDLE"
    """No live request of the Multiplex stream has that handle. NOT_FOUND, as an event of the stream."""
