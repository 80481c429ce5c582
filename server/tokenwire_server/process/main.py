"""`tokenwire serve`: parses the command line, runs the server and returns its exit code."""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

# gRPC starts threads before the engine process is created, and forking a process with threads can deadlock. vLLM reads
# this when it is imported.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

import uvloop

from tokenwire_server import simulated_device
from tokenwire_server.engine.engine import Engine
from tokenwire_server.process import arguments, loading
from tokenwire_server.process.server import STOP_SIGNALS, Server


def main(argv: Sequence[str]) -> int:
    """Run the server until it ends and exit with its exit code, without returning."""
    options = arguments.parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def build() -> Engine:
        return Engine.build(
            options.engine,
            keep_tokenizer=options.keep_tokenizer,
            adapters=options.adapters,
            direct_path=options.direct_path,
            refused_field=simulated_device.unsupported if options.simulated else None,
        )

    async def run() -> int:
        try:
            return await Server(options.server, options.engine.model, build).run()
        finally:
            # The server has shut down; a signal now would replace the exit code while the interpreter shuts down.
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    _exit(uvloop.run(run()))


def _exit(code: int) -> NoReturn:
    """Exit without the interpreter's teardown, in which libraries of the engine report hundreds of leaked objects."""
    if loading.is_running():
        # What runs at exit would wait for the load's thread, or tear down modules that it uses.
        logging.shutdown()
    else:
        atexit._run_exitfuncs()  # noqa: SLF001  # it has no public name
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
