"""The device: its requests, and the output and duration of each step."""

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
    """The exception of the option `fail_at_step`."""


class _RequestState:
    """The state of a request on the device."""

    __slots__ = ("fails", "logprobs", "output", "prompt", "prompt_length", "prompt_logprobs")

    def __init__(self, new: Any, vocabulary: Vocabulary, options: SimulatedDeviceOptions) -> None:
        prompt: list[int] = new.prompt_token_ids
        params = new.sampling_params
        self.prompt = prompt
        self.prompt_length = len(prompt)
        self.logprobs: int = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs: int | None = params.prompt_logprobs
        self.fails = prompt[0] == options.error_prompt_id
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
    """The requests of one step and their outputs; one list entry per request."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.sampled: list[list[int]] = []
        self.indexes: list[int] = []
        self.prefill: dict[str, int] = {}
        self.prompt_logprobs: dict[str, Any] = {}
        self.logprobs = -1
        """Maximum number of top log probabilities that a request of the batch asks for; -1 if none asks for any."""
        self.errors: set[str] = set()


class PendingStep:
    """A step in progress."""

    def __init__(self, output: Any, due: float) -> None:
        """Create a step.

        Args:
            output: its ModelRunnerOutput.
            due: when it is complete, by time.monotonic().

        """
        self._output = output
        self._due = due

    def wait(self) -> Any:
        """Block until the step is complete and return its ModelRunnerOutput."""
        while (remaining := self._due - time.monotonic()) > 0:
            time.sleep(remaining)
        return self._output


class FailingStep(PendingStep):
    """The step of the option `fail_at_step`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def wait(self) -> NoReturn:
        """Raise SimulatedStepError."""
        raise SimulatedStepError(f"simulated device: step {self._number} failed because of fail_at_step")


class HangingStep(PendingStep):
    """The step of the option `hang_at_step`."""

    def __init__(self) -> None:
        pass

    def wait(self) -> NoReturn:
        """Block forever."""
        while True:
            threading.Event().wait()


class Device:
    """The device of one data-parallel rank. Runs one step at a time, in the order in which they begin."""

    def __init__(self, options: SimulatedDeviceOptions, vocabulary: Vocabulary, rank: int) -> None:
        """Create a device without requests.

        Args:
            options: step times, failures and the step log.
            vocabulary: the ids that the formula uses.
            rank: data-parallel rank, for the step log.

        """
        self._options = options
        self._vocabulary = vocabulary
        self._rank = rank
        self._requests: dict[str, _RequestState] = {}
        self._step = 0
        self._free_at = 0.0
        self._log = None if options.step_log is None else StepLogWriter(options.step_log)

    def begin(self, scheduled: Any) -> PendingStep | None:
        """Begin the step of a SchedulerOutput; return None if it only drops requests and schedules no tokens."""
        # Finished ids first: an id may be reused in the same step.
        for request_id in scheduled.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._requests[new.req_id] = _RequestState(new, self._vocabulary, self._options)
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
        # Running requests first, in the scheduler's order.
        cached = scheduled.scheduled_cached_reqs
        counts = scheduled.num_scheduled_tokens
        for request_id, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            self._add(batch, request_id, computed, counts[request_id], outputs)
        for new in scheduled.scheduled_new_reqs:
            # With vLLM's V2 model runner, a preempted request is scheduled again as a new one.
            known = new.prefill_token_ids
            outputs = 0 if known is None else len(known) - len(new.prompt_token_ids)
            self._add(batch, new.req_id, new.num_computed_tokens, counts[new.req_id], outputs)
        return batch

    def _add(self, batch: _Batch, request_id: str, computed: int, count: int, outputs: int) -> None:
        request = self._requests[request_id]
        # Index of the output token that this step samples. An index below `outputs` means that the step recomputes known
        # tokens: a chunk of the prompt, or all tokens after a preemption.
        index = computed + count - request.prompt_length
        batch.ids.append(request_id)
        if not outputs or count > 1 or index < outputs:
            batch.prefill[request_id] = count
        if index < outputs:
            batch.sampled.append([])
            batch.indexes.append(0)
            return
        batch.sampled.append([request.output.token(index)])
        batch.indexes.append(index)
        batch.logprobs = max(batch.logprobs, request.logprobs)
        if index == 0 and request.prompt_logprobs is not None:
            batch.prompt_logprobs[request_id] = self._prompt_logprobs(request.prompt, request.prompt_logprobs)
        if request.fails and index == 1:
            batch.errors.add(request_id)

    def _output(self, batch: _Batch) -> Any:
        return ModelRunnerOutput(
            req_ids=batch.ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(batch.ids)},
            sampled_token_ids=batch.sampled,
            logprobs=None if batch.logprobs < 0 else self._sample_logprobs(batch),
            prompt_logprobs_dict=batch.prompt_logprobs,
            # The schedulers in `scheduler` finish these requests with "error".
            kv_connector_output=KVConnectorOutput(failed_recving=batch.errors) if batch.errors else None,
        )

    def _sample_logprobs(self, batch: _Batch) -> Any:
        """Return the log probabilities of the batch; like vLLM's sampler, pad every row to the widest request."""
        tokens = np.fromiter((row[0] if row else 0 for row in batch.sampled), np.int32, len(batch.ids))
        return LogprobsLists(*self._columns(tokens, np.array(batch.indexes), batch.logprobs))

    def _prompt_logprobs(self, prompt: list[int], top: int) -> Any:
        tokens = np.array(prompt[1:], np.int32)
        # Copied because vLLM cannot serialize an empty tensor from NumPy: a prompt of one token has no entries.
        tensors = LogprobsTensors.empty_cpu(len(tokens), top + 1)
        for tensor, values in zip(tensors, self._columns(tokens, np.arange(1, len(prompt)), top), strict=False):
            tensor.copy_(torch.from_numpy(values))
        return tensors

    def _columns(
        self, tokens: npt.NDArray[np.int32], indexes: npt.NDArray[np.int64], top: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return log probabilities in vLLM's layout.

        Args:
            tokens: the tokens, of shape [tokens].
            indexes: their index in the output or in the prompt, of shape [tokens].
            top: number of top tokens per token.

        Returns:
            Ids and log probabilities of shape [tokens, 1 + top], column 0 being the token itself, and the token's ranks
            of shape [tokens].

        """
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
                    held=list(self._requests),
                    dropped=sorted(scheduled.finished_req_ids),
                )
            )
