"""What tests need to run a real server: a `tokenwire serve` process that leaves nothing behind."""

from harness.processes import Finished, run, stray_processes
from harness.server import COMMAND, ServerFailedError, ServerProcess

__all__ = ["COMMAND", "Finished", "ServerFailedError", "ServerProcess", "run", "stray_processes"]
