"""What processes use, from the operating system's own accounting."""

import socket
import sys
import time

import psutil

_HAS_PROCESS_CLOCKS = sys.platform == "linux"


def cpu_seconds(pid: int) -> float:
    """Give the CPU time that a process has used, its children not included. Raises OSError when it is gone."""
    if _HAS_PROCESS_CLOCKS:
        # The process's POSIX clock, clock_getcpuclockid(3): nanoseconds, where psutil's figures come in steps of 10 ms.
        return time.clock_gettime(~pid << 3 | 2)
    return _cpu_times(pid)


def resident_bytes(pid: int) -> int:
    """Give the memory that a process holds. Raises OSError when it is gone."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error as error:
        raise ProcessLookupError(str(error)) from error


def _cpu_times(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error as error:
        raise ProcessLookupError(str(error)) from error
    return times.user + times.system


def find_listener(target: str) -> int | None:
    """Find the process of this machine that listens on a target, where that can be known."""
    kind, address = _local_address(target)
    if address is None:
        return None
    try:
        connections = psutil.net_connections(kind)
    except psutil.Error:
        return None
    for connection in connections:
        if connection.pid is None or connection.status not in (psutil.CONN_LISTEN, psutil.CONN_NONE):
            continue
        # A UNIX socket's address is its path, a TCP socket's a pair.
        local = connection.laddr if kind == "unix" else getattr(connection.laddr, "port", None)
        if local == address:
            return connection.pid
    return None


def _local_address(target: str) -> tuple[str, str | int | None]:
    """Give the kind of socket and its path or port; None where it may be another machine's."""
    if target.startswith("unix:"):
        return "unix", target.removeprefix("unix:").replace("///", "/", 1)
    host, _, port = target.removeprefix("dns:").lstrip("/").rpartition(":")
    return "tcp", int(port) if port.isdecimal() and _is_loopback(host.strip("[]")) else None


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.") or host == "::1"
    except OSError:
        return host == "::1"
