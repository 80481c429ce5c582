"""The caller of an RPC: the principal that owns its requests, and the token it was authenticated with."""

from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc

from tokenwire._contract import Reason
from tokenwire_server.access.tokens import Grant
from tokenwire_server.errors import RequestError

_grant: ContextVar[Grant | None] = ContextVar("grant", default=None)


class Caller(NamedTuple):
    """The caller of an RPC."""

    principal: str
    """Owner of the requests and their ids, without white space; "" without authentication, where all share one."""
    client: str
    """Key of the limit per client: the principal, or without authentication the address of the machine."""
    grant: Grant | None = None
    """The token of the call; None if the call did not need one."""

    def check(self) -> None:
        """Check that the token of the call is still valid; a long stream may outlive its token.

        Raises:
            RequestError: UNAUTHENTICATED, the token has been revoked since the call began.

        """
        if self.grant is not None and self.grant.revoked:
            raise RequestError(Reason.UNAUTHENTICATED, "the token of this call has been revoked")


def set_grant(grant: Grant) -> None:
    """Set the token of the running call."""
    _grant.set(grant)


def of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """Return the caller of the running call, identified by its token, else by its TLS certificate, else by its machine.

    Raises:
        RequestError: PERMISSION_DENIED, the client certificate contains no name.

    """
    grant = _grant.get()
    if grant is not None:
        return Caller(grant.principal, grant.principal, grant)
    # gRPC's peer identities: the subject alternative names, or the common name if there are none. They are set for a
    # verified certificate only.
    if name := quote(next(iter(context.peer_identities() or ()), b""), safe="/:@"):
        return Caller(name, name)
    if "x509_pem_cert" in context.auth_context():
        raise RequestError(
            Reason.PERMISSION_DENIED, "the client certificate has neither an alternative name nor a common name"
        )
    return Caller("", _machine(context.peer()))


def _machine(peer: str) -> str:
    """Return the address of a peer such as "ipv4:127.0.0.1:1234" without its port; all UNIX socket peers are "unix"."""
    return "unix" if peer.startswith("unix:") else peer.rpartition(":")[0]
