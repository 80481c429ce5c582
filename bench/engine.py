"""The engine's arguments, the same for every contender, and the commands of their servers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenwire_server.simulated_device.options import SimulatedDeviceOptions
from tokenwire_server.simulated_device.setup import CONFIG_KEY

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
"""The environment of the engine: what `tokenwire serve` and vLLM's HTTP server run in."""
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""The same with requirements/bench.lock on top. Its smg-grpc-servicer is a plug-in of every vLLM that finds it."""

EXECUTOR = "tokenwire_server.simulated_device.executor.SimulatedExecutor"

_COMMON: dict[str, Any] = {
    "max_model_len": 16_384,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8_192,
    # Several contenders share a server, and none shall find the prompts of the one before.
    "enable_prefix_caching": False,
}
"""Set for all, since defaults differ from entry point to entry point."""


def arguments(model: str, step_ms: float) -> dict[str, Any]:
    """Give vLLM's engine arguments: those that `tokenwire serve --simulated-device` sets, and the common ones."""
    return _COMMON | {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "num_gpu_blocks_override": 65_536,
        "block_size": 16,
        "async_scheduling": False,
        "distributed_executor_backend": EXECUTOR,
        "additional_config": {CONFIG_KEY: dataclasses.asdict(SimulatedDeviceOptions(step_ms=step_ms))},
    }


def command(server: str, model: str, step_ms: float, port: int) -> list[str]:
    """Give the command that starts a server."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    match server:
        case "tokenwire":
            options = [*where, "--simulated-device", f"step_ms={step_ms:g}", *_flags(_COMMON)]
            return [str(PYTHON.with_name("tokenwire")), "serve", model, *options]
        case "smg":
            module = [str(BENCH_PYTHON), "-m", "vllm.entrypoints.launchers.grpc_server"]
            return [*module, *where, *_flags(arguments(model, step_ms))]
        case "http":
            module = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--tokens-only"]
            return [*module, *where, *_flags(arguments(model, step_ms))]
    raise ValueError(f"no server {server!r}")


def _flags(values: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
