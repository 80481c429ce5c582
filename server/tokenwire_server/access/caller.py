"""Whose call this is."""

from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc

from tokenwire._contract import Reason
from tokenwire_server.access.tokens import Grant
from tokenwire_server.errors import RequestError

_grant: ContextVar[Grant | None] = ContextVar("grant", default=None)


class Caller(NamedTuple):
    """Who sends requests."""

    principal: str
    """Owner of the requests and their ids, without white space; "" for anybody, where there is no authentication."""
    client: str
    """What a limit for each client counts by: the principal, or the machine where there is none."""
    grant: Grant | None = None
    """What the call's token gives; None where it needs none."""

    def check(self) -> None:
        """Refuse one whose token has been revoked since the call began.

        Raises:
            RequestError: UNAUTHENTICATED.

        """
        if self.grant is not None and self.grant.revoked:
            raise RequestError(Reason.UNAUTHENTICATED, "the token of this call has been revoked")


def set_grant(grant: Grant) -> None:
    """Say what the token of the running call gives."""
    _grant.set(grant)


def of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """Return the caller of the running call: by its token, else by its TLS certificate, else anybody.

    Raises:
        RequestError: the certificate names nobody, PERMISSION_DENIED.

    """
    grant = _grant.get()
    if grant is not None:
        return Caller(grant.principal, grant.principal, grant)
    # gRPC's notion: the alternative names, or the common name where there are none. Only a verified certificate counts.
    if name := quote(next(iter(context.peer_identities() or ()), b""), safe="/:@"):
        return Caller(name, name)
    if "x509_pem_cert" in context.auth_context():
        raise RequestError(
            Reason.PERMISSION_DENIED, "the client certificate has neither an alternative name nor a common name"
        )
    return Caller("", _machine(context.peer()))


def _machine(peer: str) -> str:
    """Return a peer without its port: "ipv4:127.0.0.1:1234"; all of a UNIX socket's are one."""
    return "unix" if peer.startswith("unix:") else peer.rpartition(":")[0]
