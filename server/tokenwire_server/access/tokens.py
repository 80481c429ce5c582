"""Bearer tokens from a file.

A line holds a token, or a name and a token with white space between them. Empty lines and lines that start with # say
nothing. Whoever shows a token acts as its name, the *principal*, to which its requests belong; several tokens may have
one name. A token without a name has a principal of its own.
"""

import asyncio
import hashlib
import hmac
import logging
import pathlib
import re

from tokenwire_server.access.files import AccessError, read, state, warn_if_public

logger = logging.getLogger(__name__)

_OPTION = "--token-file"
_INTERVAL = 1.0
"""Seconds between looks at whether the file has changed."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# RFC 6750's form, and long enough that nobody guesses it.
_TOKEN = re.compile(r"(?=.{16,1024}$)[A-Za-z0-9._~+/-]+=*")


class Grant:
    """What a token gives to those who show it."""

    __slots__ = ("digest", "principal", "revoked")

    def __init__(self, principal: str, digest: bytes) -> None:
        self.principal = principal
        self.digest = digest
        """The token's SHA-256; the token itself is not kept."""
        self.revoked = False
        """Whether the file holds the token no more."""


class TokenFile:
    """The tokens of a file, as it is now. Holds none before `load`."""

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)
        self._grants: list[Grant] = []
        self._state = state(())

    def load(self) -> None:
        """Read the file.

        Raises:
            AccessError: it cannot be read, or holds something else than tokens, or none; the earlier ones stay.

        """
        self._state = state((self._path,))
        grants = _parse(self._path, read(_OPTION, self._path))
        warn_if_public(_OPTION, self._path)
        before = {(grant.principal, grant.digest): grant for grant in self._grants}
        self._grants = [before.pop((grant.principal, grant.digest), grant) for grant in grants]
        for gone in before.values():
            gone.revoked = True

    async def watch(self) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            if state((self._path,)) != self._state:
                self._reload()

    def _reload(self) -> None:
        try:
            self.load()
        except AccessError as error:
            logger.error("the tokens stay as they were: %s", error)  # noqa: TRY400  # the one line says it all
        else:
            logger.info("read %s again: %d tokens", self._path, len(self._grants))

    def grant(self, token: str) -> Grant | None:
        """Return what a token gives; None for one that is not in the file.

        Takes as long for each: digests are compared, in constant time, and with all tokens.
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
        raise AccessError(f"{_OPTION} {path}: is no UTF-8 text") from None
    grants: dict[bytes, Grant] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        fault = _fault(fields)
        digest = _digest(fields[-1])
        if fault is None and digest in grants:
            fault = "the token is in the file already"
        if fault is not None:
            raise AccessError(f"{_OPTION} {path}, line {number}: {fault}")
        # Of no use for a guess at the token itself: it has at least 16 characters.
        own = hashlib.sha256(b"principal of " + digest).hexdigest()[:16]
        grants[digest] = Grant(fields[0] if len(fields) > 1 else f"token-{own}", digest)
    if not grants:
        raise AccessError(f"{_OPTION} {path}: holds no token")
    return list(grants.values())


def _fault(fields: list[str]) -> str | None:
    if len(fields) > 2:  # noqa: PLR2004  # a name and a token
        return "holds more than a name and a token"
    if not _TOKEN.fullmatch(fields[-1]):
        return "a token has 16 to 1024 letters, digits and -._~+/ with = at the end only"
    if len(fields) > 1 and not _NAME.fullmatch(fields[0]):
        return "a name has 1 to 64 letters, digits and ._-"
    return None
