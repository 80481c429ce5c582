"""Makes sure that no engine process outlives its server, however the server ends.

vLLM's engine process does not detect that its parent has died: after a SIGKILL of the server it would keep the GPU.
Therefore the engine process and its workers ask the kernel for a signal at the death of their parent. vLLM calls
`register` in each of its processes, as a plug-in of the entry-point group "vllm.general_plugins".

A process needs seconds to start until it calls `register`. While the engine is loading, the server is a child subreaper
(see prctl(2)): processes whose parent dies become its children, and it terminates them itself.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Collection

import psutil

_VARIABLE = "TOKENWIRE_SERVER_PID"
"""Environment variable that marks the processes of a tokenwire server."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""


def adopt() -> None:
    """Mark engine processes started from now on as this server's, and become a child subreaper."""
    os.environ[_VARIABLE] = str(os.getpid())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def release() -> None:
    """Stop being a child subreaper, once all engine processes have called `register`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children() -> frozenset[psutil.Process]:
    """Return the children of this process; before a load, they belong to the script that `exec`ed this process."""
    return frozenset(psutil.Process().children())


def end_descendants(*, force: bool, spare: Collection[psutil.Process]) -> None:
    """Send a signal to all descendants of this process, without waiting for them to exit.

    Args:
        force: whether to send SIGKILL instead of SIGTERM.
        spare: children of this process that get no signal, nor do their descendants.

    """
    found: list[psutil.Process] = []
    for child in children().difference(spare):
        found.append(child)
        with contextlib.suppress(psutil.Error):
            found += child.children(recursive=True)
    for process in found:
        with contextlib.suppress(psutil.Error):
            # Python's resource tracker removes the shared memory of the other processes after they exit, then exits too.
            if any("resource_tracker" in argument for argument in process.cmdline()):
                continue
            process.send_signal(signal.SIGKILL if force else signal.SIGTERM)


def register() -> None:
    """Kill this process when its parent dies, if it is an engine process of a tokenwire server."""
    server = os.environ.get(_VARIABLE)
    if server is None or os.getpid() == int(server):
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before the prctl call
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
