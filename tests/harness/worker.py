"""A worker of vLLM's CPU engine, for `--worker-cls harness.worker.HangingWorker`, that never gets its model."""

import signal
import sys
import threading

from vllm.v1.worker.cpu_worker import CPUWorker


class HangingWorker(CPUWorker):  # type: ignore[misc]  # vLLM's types are Any here
    """Hangs while it loads the model, deaf to SIGTERM."""

    def load_model(self, *_arguments: object, **_options: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        sys.stderr.write("the worker hangs\n")
        sys.stderr.flush()
        threading.Event().wait()
