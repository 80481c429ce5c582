"""No engine process outlives its server, however the server ends.

vLLM's engine process does not notice that the process which started it is gone: after a SIGKILL of the server it would
keep the GPU. So it asks the kernel for a signal at its parent's death, and so do its workers. vLLM calls `register` in
each of its processes, as a plug-in of the entry-point group "vllm.general_plugins".
"""

import ctypes
import os
import signal

_VARIABLE = "TOKENWIRE_SERVER_PID"
_PR_SET_PDEATHSIG = 1


def adopt() -> None:
    """Say that engine processes started from now on belong to this process."""
    os.environ[_VARIABLE] = str(os.getpid())


def register() -> None:
    """Bind this process to its parent's life, where it descends from a tokenwire server."""
    server = os.environ.get(_VARIABLE)
    if server is None or os.getpid() == int(server):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died in between
        os.kill(os.getpid(), signal.SIGKILL)
