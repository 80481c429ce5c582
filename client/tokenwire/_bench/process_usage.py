"""CPU time and memory of processes, as accounted by the operating system."""

import socket
import sys
import time

import psutil

_HAS_PROCESS_CLOCKS = sys.platform == "linux"


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, without its children. Raises OSError if it has exited."""
    if _HAS_PROCESS_CLOCKS:
        # The process's POSIX CPU clock, see clock_getcpuclockid(3), has nanoseconds. psutil's resolution is 10 ms.
        return time.clock_gettime(~pid << 3 | 2)
    return _cpu_times(pid)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, in bytes. Raises OSError if it has exited."""
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
    """Return the id of the process on this machine that listens on a target. None: unknown."""
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
        # The address of a Unix domain socket is its path, that of a TCP socket a pair.
        local = connection.laddr if kind == "unix" else getattr(connection.laddr, "port", None)
        if local == address:
            return connection.pid
    return None


def _local_address(target: str) -> tuple[str, str | int | None]:
    """Return the kind of socket and its path or port. None: it may be on another machine."""
    if target.startswith("unix:"):
        return "unix", target.removeprefix("unix:").replace("///", "/", 1)
    host, _, port = target.removeprefix("dns:").lstrip("/").rpartition(":")
    return "tcp", int(port) if port.isdecimal() and _is_loopback(host.strip("[]")) else None


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.") or host == "::1"
    except OSError:
        return host == "::1"
