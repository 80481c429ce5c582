"""What the contract says beside its messages: its revision, the error domain and the error reasons.

Shared by client and server, so that neither spells a reason by hand.
"""

from enum import StrEnum

CONTRACT_REVISION = 2
"""Revision of `protos/` that this package was built from; rises with every change (`EngineInfo.contract_revision`)."""

ERROR_DOMAIN = "tokenwire.v1"
"""Domain of every `google.rpc.ErrorInfo` that a tokenwire server sends."""


class Reason(StrEnum):
    """Why a call failed: `google.rpc.ErrorInfo.reason`, what programs branch on."""

    INVALID_FIELD = "INVALID_FIELD"
    """A field's value is wrong; the field violations say which. INVALID_ARGUMENT."""
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    """The server has no model or adapter of that name. NOT_FOUND."""
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    """A live request has that id. ALREADY_EXISTS."""
    TOKENIZER_REQUIRED = "TOKENIZER_REQUIRED"
    """The server was not started with --keep-tokenizer. FAILED_PRECONDITION."""
    ENGINE_ASLEEP = "ENGINE_ASLEEP"
    """The engine sleeps. FAILED_PRECONDITION."""
    UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD"
    """This server or engine does not honour a field that is set. UNIMPLEMENTED."""
    UNSUPPORTED_METHOD = "UNSUPPORTED_METHOD"
    """This server does not have that method. UNIMPLEMENTED."""
    ENGINE_LOADING = "ENGINE_LOADING"
    """The engine is still loading. UNAVAILABLE, worth retrying."""
    QUEUE_FULL = "QUEUE_FULL"
    """A limit of unfinished requests is reached: the engine's, a stream's or a client's. UNAVAILABLE, worth retrying."""
    QUEUED_TOKENS_LIMIT = "QUEUED_TOKENS_LIMIT"
    """The engine's limit of queued prompt tokens is reached. UNAVAILABLE, worth retrying."""
    ENGINE_PAUSED = "ENGINE_PAUSED"
    """The engine is paused and takes no requests. UNAVAILABLE, worth retrying."""
    DRAINING = "DRAINING"
    """The server is shutting down. UNAVAILABLE; retry elsewhere."""
    ENGINE_DEAD = "ENGINE_DEAD"
    """The engine has died. UNAVAILABLE; retry elsewhere."""
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    """The answer would not fit the message size limit. RESOURCE_EXHAUSTED."""
    SLOW_READER = "SLOW_READER"
    """The caller did not read its stream for too long. RESOURCE_EXHAUSTED."""
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    """The call's deadline passed. DEADLINE_EXCEEDED."""
    REQUEST_FAILED = "REQUEST_FAILED"
    """The engine ended this request with an error; others go on. INTERNAL."""
    INTERNAL = "INTERNAL"
    """A bug in the server; its log has the cause. INTERNAL."""
    UNAUTHENTICATED = "UNAUTHENTICATED"
    """No credential or a wrong one. UNAUTHENTICATED."""
    PERMISSION_DENIED = "PERMISSION_DENIED"
    """The credential does not allow this. PERMISSION_DENIED."""
    HANDLE_IN_USE = "HANDLE_IN_USE"
    """A live request of the Multiplex stream has that handle. ALREADY_EXISTS, in the stream."""
    UNKNOWN_HANDLE = "UNKNOWN_HANDLE"
    """No live request of the Multiplex stream has that handle. NOT_FOUND, in the stream."""
