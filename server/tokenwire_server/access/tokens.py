"""Bearer tokens from a file.

A line contains a token, or a name and a token separated by white space. Empty lines and lines that start with # are
ignored. The name is the *principal* that owns the requests sent with the token. Several tokens may share a name; a token
without a name is a principal of its own.
"""

import asyncio
import hashlib
import hmac
import logging
import pathlib
import re

from tokenwire_server.access.files import AccessError, fingerprint, read, warn_if_world_readable

logger = logging.getLogger(__name__)

_OPTION = "--token-file"
_INTERVAL = 1.0
"""Seconds between checks for a changed file."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# RFC 6750's b64token; at least 16 characters against guessing, at most 1024 to fit into gRPC's 8 KiB of metadata.
_TOKEN = re.compile(r"(?=.{16,1024}$)[A-Za-z0-9._~+/-]+=*")


class Grant:
    """A valid token: the principal that it authenticates."""

    __slots__ = ("digest", "principal", "revoked")

    def __init__(self, principal: str, digest: bytes) -> None:
        self.principal = principal
        self.digest = digest
        """SHA-256 of the token; the token itself is not kept."""
        self.revoked = False
        """Whether the token has been removed from the file."""


class TokenFile:
    """The tokens of a file, reloaded when it changes. Empty until `load` is called."""

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)
        self._grants: list[Grant] = []
        self._loaded = fingerprint(())

    def load(self) -> None:
        """Read the file and revoke the tokens that are no longer in it.

        Raises:
            AccessError: the file cannot be read, is malformed or contains no token; the previous tokens stay valid.

        """
        self._loaded = fingerprint((self._path,))
        grants = _parse(self._path, read(_OPTION, self._path))
        warn_if_world_readable(_OPTION, self._path)
        previous = {(grant.principal, grant.digest): grant for grant in self._grants}
        self._grants = [previous.pop((grant.principal, grant.digest), grant) for grant in grants]
        for removed in previous.values():
            removed.revoked = True

    async def watch(self) -> None:
        """Reload the file whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            if fingerprint((self._path,)) != self._loaded:
                self._reload()

    def _reload(self) -> None:
        try:
            self.load()
        except AccessError as error:
            logger.error("cannot reload the tokens, keeping the previous ones: %s", error)  # noqa: TRY400  # one line is enough
        else:
            logger.info("reloaded %s: %d tokens", self._path, len(self._grants))

    def grant(self, token: str) -> Grant | None:
        """Return the grant of a token; None if the token is not in the file.

        The time does not depend on the token: its digest is compared with that of every token, in constant time.
        """
        digest = _digest(token)
        found = None
        for grant in self._grants:
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _parse(path: pathlib.Path, content: bytes) -> list[Grant]:
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise AccessError(f"{_OPTION} {path}: is not UTF-8 text") from None
    grants: dict[bytes, Grant] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        problem = _format_error(fields)
        digest = _digest(fields[-1])
        if problem is None and digest in grants:
            problem = "the token is already in the file"
        if problem is not None:
            raise AccessError(f"{_OPTION} {path}, line {number}: {problem}")
        # Does not help to guess the token, which has at least 16 characters.
        own = hashlib.sha256(b"principal of " + digest).hexdigest()[:16]
        grants[digest] = Grant(fields[0] if len(fields) > 1 else f"token-{own}", digest)
    if not grants:
        raise AccessError(f"{_OPTION} {path}: contains no token")
    return list(grants.values())


def _format_error(fields: list[str]) -> str | None:
    if len(fields) > 2:  # noqa: PLR2004  # a name and a token
        return "expected a name and a token"
    if not _TOKEN.fullmatch(fields[-1]):
        return "a token must be 16 to 1024 characters out of A-Z, a-z, 0-9 and -._~+/, with = only at its end"
    if len(fields) > 1 and not _NAME.fullmatch(fields[0]):
        return "a name must be 1 to 64 characters out of A-Z, a-z, 0-9 and ._-"
    return None
