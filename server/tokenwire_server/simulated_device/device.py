"""The device itself: the requests that it holds, what a step gives, and how long it takes."""

import threading
import time
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import KVConnectorOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from tokenwire_server.simulated_device.formula import LOGPROB_PER_RANK, RANKS, OutputSequence, Vocabulary
from tokenwire_server.simulated_device.options import SimulatedDeviceOptions
from tokenwire_server.simulated_device.step_log import Step, StepLogWriter


class SimulatedStepError(RuntimeError):
    """The failure that `fail_at_step` asks for."""


class _Held:
    """A request on the device."""

    __slots__ = ("errs", "logprobs", "output", "prompt", "prompt_length", "prompt_logprobs")

    def __init__(self, new: Any, vocabulary: Vocabulary, options: SimulatedDeviceOptions) -> None:
        prompt: list[int] = new.prompt_token_ids
        params = new.sampling_params
        self.prompt = prompt
        self.prompt_length = len(prompt)
        self.logprobs: int = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs: int | None = params.prompt_logprobs
        self.errs = prompt[0] == options.error_prompt_id
        self.output = OutputSequence(
            vocabulary,
            prompt,
            seed=params.seed,
            min_tokens=params.min_tokens,
            stop_token_ids=params.all_stop_token_ids,
            eos_after=options.eos_after,
            eos_token_id=params.eos_token_id,
        )


class _Batch:
    """What one step is to give, gathered request by request."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.sampled: list[list[int]] = []
        self.indexes: list[int] = []
        self.prefill: dict[str, int] = {}
        self.prompt_logprobs: dict[str, Any] = {}
        self.logprobs = -1
        self.errors: set[str] = set()


class PendingStep:
    """A step that the device works on."""

    def __init__(self, output: Any, due: float) -> None:
        self._output = output
        self._due = due

    def wait(self) -> Any:
        """Return the ModelRunnerOutput once the device is done with the step."""
        while (left := self._due - time.monotonic()) > 0:
            time.sleep(left)
        return self._output


class FailingStep(PendingStep):
    """The step of `fail_at_step`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def wait(self) -> NoReturn:
        """Raise."""
        raise SimulatedStepError(f"simulated device: step {self._number} fails as asked by fail_at_step")


class HangingStep(PendingStep):
    """The step of `hang_at_step`."""

    def __init__(self) -> None:
        pass

    def wait(self) -> NoReturn:
        """Block until the process is killed."""
        while True:
            threading.Event().wait()


class Device:
    """One data-parallel rank's device. It computes the steps in the order in which they begin, one at a time."""

    def __init__(self, options: SimulatedDeviceOptions, vocabulary: Vocabulary, rank: int) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._rank = rank
        self._held: dict[str, _Held] = {}
        self._step = 0
        self._free_at = 0.0
        self._log = None if options.step_log is None else StepLogWriter(options.step_log)

    def begin(self, scheduled: Any) -> PendingStep | None:
        """Take vLLM's SchedulerOutput; None means that it only dropped requests and there is nothing to compute."""
        # In this order: an id may be dropped and used again in the same step.
        for request_id in scheduled.finished_req_ids:
            self._held.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._held[new.req_id] = _Held(new, self._vocabulary, self._options)
        if not scheduled.total_num_scheduled_tokens:
            self._write(scheduled, {})
            return None
        self._step += 1
        batch = self._gather(scheduled)
        self._write(scheduled, batch.prefill)
        if self._step == self._options.fail_at_step:
            return FailingStep(self._step)
        if self._step == self._options.hang_at_step:
            return HangingStep()
        if self._step == self._options.error_request_at_step:
            batch.errors.add(batch.ids[0])
        seconds = self._options.step_ms / 1e3 + self._options.prefill_us_per_token / 1e6 * sum(batch.prefill.values())
        self._free_at = max(time.monotonic(), self._free_at) + seconds
        return PendingStep(self._output(batch), self._free_at)

    def close(self) -> None:
        """Close the step log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _gather(self, scheduled: Any) -> _Batch:
        batch = _Batch()
        # Requests that ran before come first, as in the scheduler's own order.
        cached = scheduled.scheduled_cached_reqs
        counts = scheduled.num_scheduled_tokens
        for request_id, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            self._add(batch, request_id, computed, counts[request_id], outputs)
        for new in scheduled.scheduled_new_reqs:
            # With vLLM's second model runner a request comes as a new one again after a preemption.
            known = new.prefill_token_ids
            outputs = 0 if known is None else len(known) - len(new.prompt_token_ids)
            self._add(batch, new.req_id, new.num_computed_tokens, counts[new.req_id], outputs)
        return batch

    def _add(self, batch: _Batch, request_id: str, computed: int, count: int, outputs: int) -> None:
        held = self._held[request_id]
        # The index of the output token that follows the last token computed; below `outputs`, tokens are computed that
        # are known already: a prompt's chunk, or all of them again after a preemption.
        index = computed + count - held.prompt_length
        batch.ids.append(request_id)
        if not outputs or count > 1 or index < outputs:
            batch.prefill[request_id] = count
        if index < outputs:
            batch.sampled.append([])
            batch.indexes.append(0)
            return
        batch.sampled.append([held.output.token(index)])
        batch.indexes.append(index)
        batch.logprobs = max(batch.logprobs, held.logprobs)
        if index == 0 and held.prompt_logprobs is not None:
            batch.prompt_logprobs[request_id] = self._prompt_logprobs(held.prompt, held.prompt_logprobs)
        if held.errs and index == 1:
            batch.errors.add(request_id)

    def _output(self, batch: _Batch) -> Any:
        return ModelRunnerOutput(
            req_ids=batch.ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(batch.ids)},
            sampled_token_ids=batch.sampled,
            logprobs=None if batch.logprobs < 0 else self._sample_logprobs(batch),
            prompt_logprobs_dict=batch.prompt_logprobs,
            # Such requests end with "error" through `scheduler`.
            kv_connector_output=KVConnectorOutput(failed_recving=batch.errors) if batch.errors else None,
        )

    def _sample_logprobs(self, batch: _Batch) -> Any:
        """Give every row as many columns as the request that asks for most, as vLLM's sampler does."""
        tokens = np.fromiter((row[0] if row else 0 for row in batch.sampled), np.int32, len(batch.ids))
        return LogprobsLists(*self._columns(tokens, np.array(batch.indexes), batch.logprobs))

    def _prompt_logprobs(self, prompt: list[int], top: int) -> Any:
        tokens = np.array(prompt[1:], np.int32)
        # Copied, since vLLM cannot send an empty tensor that NumPy made: a prompt of one token has no entries.
        tensors = LogprobsTensors.empty_cpu(len(tokens), top + 1)
        for tensor, values in zip(tensors, self._columns(tokens, np.arange(1, len(prompt)), top), strict=False):
            tensor.copy_(torch.from_numpy(values))
        return tensors

    def _columns(
        self, tokens: npt.NDArray[np.int32], indexes: npt.NDArray[np.int64], top: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return ids, log probabilities and ranks in vLLM's layout: the token itself first, then the top ones."""
        ranks = (1 + indexes % RANKS).astype(np.int32)
        steps = np.arange(1, top + 1, dtype=np.int32)
        ids = np.empty((len(tokens), top + 1), np.int32)
        ids[:, 0] = tokens
        ids[:, 1:] = (tokens[:, None] + steps - ranks[:, None]) % self._vocabulary.size
        logprobs = np.empty(ids.shape, np.float32)
        logprobs[:, 0] = LOGPROB_PER_RANK * ranks
        logprobs[:, 1:] = LOGPROB_PER_RANK * steps
        return ids, logprobs, ranks

    def _write(self, scheduled: Any, prefill: dict[str, int]) -> None:
        if self._log is not None:
            self._log.write(
                Step(
                    step=self._step,
                    rank=self._rank,
                    tokens=scheduled.num_scheduled_tokens,
                    prefill=prefill,
                    held=list(self._held),
                    dropped=sorted(scheduled.finished_req_ids),
                )
            )
