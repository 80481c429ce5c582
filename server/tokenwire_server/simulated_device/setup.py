"""Sets up vLLM's engine arguments for the simulated device, and finds what the device does not support."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from tokenwire_server.simulated_device.options import SimulatedDeviceError, SimulatedDeviceOptions

CONFIG_KEY: Final = "simulated_device"
"""Key of the options in vLLM's `additional_config`, from which the engine process reads them."""

_EXECUTOR: Final = "tokenwire_server.simulated_device.executor.SimulatedExecutor"
_BLOCK_SIZE: Final = 16
"""Tokens per KV cache block: vLLM's default on GPUs."""
_NUM_BLOCKS: Final = 65_536
"""Enough for a million tokens; blocks cost no memory on the device."""

# Engine arguments that require a real device, with the only value that the simulated device supports.
_UNSUPPORTED_ARGUMENTS: Final[dict[str, Any]] = {
    "speculative_config": None,
    "enable_lora": False,
    "kv_transfer_config": None,
    "ec_transfer_config": None,
    "enable_prompt_embeds": False,
    "enable_return_routed_experts": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}

# Sampling parameters that guarantee something about the tokens which the formula does not guarantee, or that request
# scores which it does not define. Parameters that only change probabilities (temperature, top_p, penalties, ...) are
# accepted and have no effect.
_UNSUPPORTED_FIELDS: Final = (
    "structured_outputs",
    "bad_words",
    "_bad_words_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "thinking_token_budget",
    "trace_decode_token_ids",
    "logprob_token_ids",
    "watermarking",
)


def configure(engine_args: Any, options: SimulatedDeviceOptions) -> None:
    """Set up vLLM's AsyncEngineArgs for the simulated device, in place.

    The KV cache has 65,536 blocks of 16 tokens unless `num_gpu_blocks_override` and `block_size` are set.

    Raises:
        SimulatedDeviceError: an engine argument or an option is not supported, or the step log cannot be written.

    """
    for name, supported in _UNSUPPORTED_ARGUMENTS.items():
        if getattr(engine_args, name, supported) not in (None, supported):
            raise SimulatedDeviceError(f"the simulated device does not support --{name.replace('_', '-')}")
    if options.eos_after is not None and not _may_have_eos(Path(engine_args.model)):
        raise SimulatedDeviceError(f"eos_after requires an eos_token_id in {engine_args.model}/config.json")
    if options.step_log is not None:
        _truncate(Path(options.step_log))
    engine_args.distributed_executor_backend = _EXECUTOR
    engine_args.additional_config = {**(engine_args.additional_config or {}), CONFIG_KEY: dataclasses.asdict(options)}
    engine_args.async_scheduling = options.async_scheduling
    engine_args.skip_tokenizer_init = True
    engine_args.load_format = "dummy"
    engine_args.enforce_eager = True
    if engine_args.num_gpu_blocks_override is None:
        engine_args.num_gpu_blocks_override = _NUM_BLOCKS
    if engine_args.block_size is None:
        engine_args.block_size = _BLOCK_SIZE


def unsupported(sampling_params: Any) -> str | None:
    """Return the first field of vLLM's SamplingParams that is set but not supported; None if there is none."""
    for name in _UNSUPPORTED_FIELDS:
        if getattr(sampling_params, name, None):
            return "bad_words" if name == "_bad_words_token_ids" else name
    # An array, which has no truth value.
    if getattr(sampling_params, "prompt_logprob_token_ids", None) is not None:
        return "prompt_logprob_token_ids"
    # -1 means the whole vocabulary.
    return next((name for name in ("logprobs", "prompt_logprobs") if getattr(sampling_params, name) == -1), None)


def _may_have_eos(folder: Path) -> bool:
    """Return whether the model has, or may have, an EOS id: a tokenizer has one; of a Hub name it is not known."""
    if not (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file():
        return True
    for name in ("config.json", "generation_config.json"):
        if (file := folder / name).is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            if any(part.get("eos_token_id") is not None for part in (config, config.get("text_config") or {})):
                return True
    return False


def _truncate(path: Path) -> None:
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise SimulatedDeviceError(f"step_log={path} cannot be written: {error.strerror}") from None
