"""No engine process outlives its server, however the server ends.

vLLM's engine process does not notice that the process which started it is gone: after a SIGKILL of the server it would
keep the GPU. So it asks the kernel for a signal at its parent's death, and so do its workers. vLLM calls `register` in
each of its processes, as a plug-in of the entry-point group "vllm.general_plugins".

A process takes seconds to get there. Until the load is over, those whose parent dies become children of the server, which
ends them itself.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Collection

import psutil

_VARIABLE = "TOKENWIRE_SERVER_PID"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """Say that engine processes started from now on belong to this process, also when their own parent dies."""
    os.environ[_VARIABLE] = str(os.getpid())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def release() -> None:
    """Say that the processes have registered, and look after themselves."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children() -> frozenset[psutil.Process]:
    """Return this process's children: before a load they are those of the script that became this process."""
    return frozenset(psutil.Process().children())


def end_descendants(*, force: bool, spare: Collection[psutil.Process]) -> None:
    """Tell all processes that descend from this one to end, without waiting.

    Args:
        force: whether they have no choice.
        spare: children of this one that go on, with their descendants.

    """
    found: list[psutil.Process] = []
    for child in children().difference(spare):
        found.append(child)
        with contextlib.suppress(psutil.Error):
            found += child.children(recursive=True)
    for process in found:
        with contextlib.suppress(psutil.Error):
            # Python's own, which removes the others' shared memory after their end, and then ends too.
            if any("resource_tracker" in argument for argument in process.cmdline()):
                continue
            process.send_signal(signal.SIGKILL if force else signal.SIGTERM)


def register() -> None:
    """Bind this process to its parent's life, where it descends from a tokenwire server."""
    server = os.environ.get(_VARIABLE)
    if server is None or os.getpid() == int(server):
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it has died before that
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
