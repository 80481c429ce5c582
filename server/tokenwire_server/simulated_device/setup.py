"""Puts the simulated device into vLLM's engine arguments, and names what it cannot honour."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from tokenwire_server.simulated_device.options import SimulatedDeviceError, SimulatedDeviceOptions

CONFIG_KEY: Final = "simulated_device"
"""Where the options are in vLLM's `additional_config`; the engine process reads them there."""

_EXECUTOR: Final = "tokenwire_server.simulated_device.executor.SimulatedExecutor"
_BLOCK_SIZE: Final = 16
_NUM_BLOCKS: Final = 65_536

# Engine arguments that ask for work of a real device, with the only value that the simulated one can follow.
_REFUSED_ARGUMENTS: Final[dict[str, Any]] = {
    "speculative_config": None,
    "enable_lora": False,
    "kv_transfer_config": None,
    "ec_transfer_config": None,
    "enable_prompt_embeds": False,
    "enable_return_routed_experts": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}

# Sampling parameters that promise something about the tokens which the formula does not keep, or ask for scores that it
# does not define. What only shapes chances (temperature, top_p, penalties, ...) is accepted and has no effect.
_REFUSED_FIELDS: Final = (
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
    """Set up vLLM's AsyncEngineArgs for the simulated device; arguments that it cannot follow are refused.

    The KV cache has 65,536 blocks of 16 tokens unless `num_gpu_blocks_override` and `block_size` say otherwise.
    """
    for name, possible in _REFUSED_ARGUMENTS.items():
        if getattr(engine_args, name, possible) not in (None, possible):
            raise SimulatedDeviceError(f"the simulated device cannot honour --{name.replace('_', '-')}")
    if options.eos_after is not None and not _may_have_eos(Path(engine_args.model)):
        raise SimulatedDeviceError(f"eos_after needs an eos_token_id in {engine_args.model}/config.json")
    if options.step_log is not None:
        _empty(Path(options.step_log))
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
    """Return the name of the first field of vLLM's SamplingParams that the device cannot honour, if any."""
    for name in _REFUSED_FIELDS:
        if getattr(sampling_params, name, None):
            return "bad_words" if name == "_bad_words_token_ids" else name
    # An array, whose truth is not defined.
    if getattr(sampling_params, "prompt_logprob_token_ids", None) is not None:
        return "prompt_logprob_token_ids"
    # The whole vocabulary.
    return next((name for name in ("logprobs", "prompt_logprobs") if getattr(sampling_params, name) == -1), None)


def _may_have_eos(folder: Path) -> bool:
    """Return whether an EOS id is known for the model, or may be: a tokenizer has one, a model's name says nothing."""
    if not (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file():
        return True
    for name in ("config.json", "generation_config.json"):
        if (file := folder / name).is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            if any(part.get("eos_token_id") is not None for part in (config, config.get("text_config") or {})):
                return True
    return False


def _empty(path: Path) -> None:
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise SimulatedDeviceError(f"step_log={path} cannot be written: {error.strerror}") from None
