"""vLLM's schedulers, taught to end a request with "error" when the device says so.

In vLLM a request ends with "error" when its KV cache could not be received from another engine. The device reports such
a failure by the request's id; vLLM itself minds it only while the request waits for the transfer, these classes always.
The executor puts them in place only when an option asks for errors.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if not hasattr(Scheduler, "_handle_failed_recving"):
    raise ImportError("this vLLM's scheduler has no _handle_failed_recving: the simulated device cannot fail requests")


class _ErrsByRequest:
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute_kv_load_failures = False

    def _handle_failed_recving(self, failed_req_ids: Iterable[str]) -> set[str]:
        return {request_id for request_id in failed_req_ids if request_id in self.requests}


class ErrorScheduler(_ErrsByRequest, Scheduler):  # type: ignore[misc]
    """The ordinary scheduler."""


class ErrorAsyncScheduler(_ErrsByRequest, AsyncScheduler):  # type: ignore[misc]
    """The scheduler of `async_scheduling`."""
