"""The executor, which vLLM's EngineCore calls in place of worker processes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from tokenwire_server.simulated_device.device import Device, PendingStep
from tokenwire_server.simulated_device.formula import Vocabulary
from tokenwire_server.simulated_device.options import SimulatedDeviceOptions
from tokenwire_server.simulated_device.setup import CONFIG_KEY

# Worker methods that have no effect on the device.
_WITHOUT_EFFECT = {
    "initialize_from_config",
    "set_kv_cache_layout",
    "update_max_model_len",
    "synchronize_device",
    "execute_dummy_batch",
    "reset_mm_cache",
    "reset_encoder_cache",
    "sleep",
    "wake_up",
    "discard",
}


class _StepFuture(Future[Any]):
    """The result of a step. `result` blocks the calling thread, as with vLLM's in-process executor."""

    def __init__(self, step: PendingStep) -> None:
        super().__init__()
        self._step = step

    def result(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            raise NotImplementedError("the simulated device does not support timeouts")
        if not self.done():
            self.set_result(self._step.wait())
        return super().result()


class SimulatedExecutor(Executor):  # type: ignore[misc]
    """Runs a `Device` in the engine process; vLLM imports it by its qualified name."""

    _device: Device
    _pending: PendingStep

    def _init_executor(self) -> None:
        options = SimulatedDeviceOptions(**self.vllm_config.additional_config[CONFIG_KEY])
        vocabulary = Vocabulary(
            size=self.model_config.get_vocab_size(), eos_token_ids=_eos_token_ids(self.model_config)
        )
        # Not data_parallel_rank, which vLLM resets if the ranks are independent of each other.
        self._device = Device(options, vocabulary, self.parallel_config.data_parallel_index)
        # vLLM disables it on the CPU platform, but EngineCore reads it after it has created the executor.
        self.scheduler_config.async_scheduling = options.async_scheduling
        if options.error_request_at_step is not None or options.error_prompt_id is not None:
            name = "ErrorAsyncScheduler" if options.async_scheduling else "ErrorScheduler"
            self.scheduler_config.scheduler_cls = f"tokenwire_server.simulated_device.scheduler.{name}"

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True: steps can be scheduled while another step runs."""
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Begin a step; as with vLLM's workers, `sample_tokens` returns its result."""
        step = self._device.begin(scheduler_output)
        if step is not None:
            self._pending = step
        output = EMPTY_MODEL_RUNNER_OUTPUT if step is None else None
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
        """Return the result of the last step."""
        return _StepFuture(self._pending) if non_block else self._pending.wait()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ARG002
        args: tuple[Any, ...] = (),  # noqa: ARG002
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        non_block: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Call a worker method on the device, which is the only worker.

        Args:
            method: name of the method.
            timeout: not used.
            args: not used.
            kwargs: not used.
            non_block: whether to return a future.

        Returns:
            A list with the one result, or a future of it.

        Raises:
            NotImplementedError: the simulated device does not support the method.

        """
        results = [self._answer(method)]
        return _done(results) if non_block else results

    def check_health(self) -> None:
        """Do nothing: a step that fails ends the engine."""

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: there is no model."""

    def shutdown(self) -> None:
        """Close the step log."""
        self._device.close()

    def _answer(self, method: str | Callable[..., Any]) -> Any:
        if method in _WITHOUT_EFFECT:
            return None
        match method:
            case "get_kv_cache_spec":
                return {"simulated": self._kv_cache_spec()}
            case "determine_available_memory":
                return self.cache_config.num_gpu_blocks_override * self._kv_cache_spec().page_size_bytes
            case "get_supported_kv_cache_layouts":
                return ["LBNHC"]
            case "get_supported_tasks":
                return ("generate",)
            case "supports_draft_weight_updates":
                return False
            case "list_loras":
                return set()
        raise NotImplementedError(f"the simulated device has no worker method {method!r}")

    def _kv_cache_spec(self) -> Any:
        """Return the smallest layer for which the scheduler manages KV cache blocks; the device stores nothing in them."""
        return FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
        )


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _eos_token_ids(model_config: Any) -> tuple[int, ...]:
    """Return the distinct EOS ids of generation_config.json and config.json."""
    found: list[int] = []
    for value in (
        model_config.try_get_generation_config().get("eos_token_id"),
        getattr(model_config.hf_text_config, "eos_token_id", None),
    ):
        found.extend(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(dict.fromkeys(found))
