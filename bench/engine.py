"""Engine arguments, identical for all contenders, and the commands that start the servers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenwire_server.simulated_device.options import SimulatedDeviceOptions
from tokenwire_server.simulated_device.setup import CONFIG_KEY

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
"""Interpreter of the environment with the engine, for `tokenwire serve` and vLLM's HTTP server."""
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""Interpreter of the same environment plus requirements/bench.lock; vLLM loads smg-grpc-servicer wherever it is installed."""

EXECUTOR = "tokenwire_server.simulated_device.executor.SimulatedExecutor"

_COMMON: dict[str, Any] = {
    "max_model_len": 16_384,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8_192,
    # Several contenders share a server; none may benefit from the prompts of the previous one.
    "enable_prefix_caching": False,
}
"""Set explicitly because vLLM's entry points have different defaults."""


def arguments(model: str, step_ms: float) -> dict[str, Any]:
    """Return vLLM's engine arguments: the ones that `tokenwire serve --simulated-device` sets, and the common ones."""
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
    """Return the command that starts a server.

    Args:
        server: "tokenwire", "smg" or "http".
        model: the model folder.
        step_ms: duration of an engine step, in milliseconds.
        port: TCP port on 127.0.0.1.

    Raises:
        ValueError: the server is unknown.

    """
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    match server:
        case "tokenwire":
            options = [*listen, "--simulated-device", f"step_ms={step_ms:g}", *_flags(_COMMON)]
            return [str(PYTHON.with_name("tokenwire")), "serve", model, *options]
        case "smg":
            module = [str(BENCH_PYTHON), "-m", "vllm.entrypoints.launchers.grpc_server"]
            return [*module, *listen, *_flags(arguments(model, step_ms))]
        case "http":
            module = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--tokens-only"]
            return [*module, *listen, *_flags(arguments(model, step_ms))]
    raise ValueError(f"unknown server {server!r}")


def _flags(values: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
