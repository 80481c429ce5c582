"""vLLM's schedulers, extended to finish a request with "error" when the device reports one.

vLLM finishes a request with "error" when its KV cache could not be received from another engine. The device reports such
a failure by the request's id. vLLM handles it only while the request waits for the transfer; these classes handle it at any
time. The executor installs them only if an option requires errors.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if not hasattr(Scheduler, "_handle_failed_recving"):
    raise ImportError("this vLLM's scheduler has no _handle_failed_recving: the simulated device cannot fail requests")


class _FailsRequests:
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute_kv_load_failures = False

    def _handle_failed_recving(self, failed_req_ids: Iterable[str]) -> set[str]:
        return {request_id for request_id in failed_req_ids if request_id in self.requests}


class ErrorScheduler(_FailsRequests, Scheduler):  # type: ignore[misc]
    """The scheduler without `async_scheduling`."""


class ErrorAsyncScheduler(_FailsRequests, AsyncScheduler):  # type: ignore[misc]
    """The scheduler with `async_scheduling`."""
