"""The server's address, in the forms that a client accepts and in the form that gRPC does."""

import ipaddress
import re

DEFAULT_PORT = 50051

# The resolvers of gRPC's C core. It would take any other scheme as a part of a host name.
_NAMES_WITH_PORT = {"dns", "ipv4", "ipv6"}
_OTHER_NAMES = {"unix", "unix-abstract", "vsock", "xds"}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_HOST = r"\[[^\s\[\]/@?#]+\]|[^\s\[\]:/@?#]+"
_ADDRESS = re.compile(rf"({_HOST})(?::(\d{{1,5}}))?")
_MAX_PORT = 65_535


def grpc_target(target: str) -> str:
    """Return the target as gRPC takes it, with port 50051 if it is a host without one.

    Raises ValueError for what gRPC would take as a host name that does not exist, and only report when it connects.
    """
    parts = _SCHEME.fullmatch(target)
    scheme, rest = (parts[1].lower(), parts[2]) if parts else ("", "")
    if scheme in _OTHER_NAMES and rest.strip("/"):
        return f"{scheme}:{rest}"
    if scheme in _NAMES_WITH_PORT:
        # dns://authority/host has the name server's address in front; ipv4:a,b is a list.
        head, slash, addresses = rest.rpartition("/")
        return f"{scheme}:{head}{slash}" + ",".join(_with_port(target, address) for address in addresses.split(","))
    if scheme == "grpc" and rest.startswith("//"):
        return _with_port(target, rest[2:].removesuffix("/"))
    return _with_port(target, target)


def _with_port(target: str, address: str) -> str:
    """Return host:port. `target` is what the caller passed, for the error."""
    if _is_bare_ipv6(address):
        return f"[{address}]:{DEFAULT_PORT}"
    parts = _ADDRESS.fullmatch(address)
    if parts is None or (parts[2] is not None and not 0 < int(parts[2]) <= _MAX_PORT):
        raise ValueError(f"target must be host:port or unix:path, not {target!r}")
    return address if parts[2] is not None else f"{address}:{DEFAULT_PORT}"


def _is_bare_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6  # noqa: PLR2004
    except ValueError:
        return False
