"""The simulated device: vLLM's real AsyncLLM, EngineCore and scheduler without model weights or a GPU.

A custom vLLM executor replaces the worker processes. The model's folder needs only a config.json. Tokens and log
probabilities follow the formula in `formula`, so a client can compute them in advance. `options` defines the options,
`setup` applies them to vLLM's engine arguments, and `step_log` records what the device was given in each step.

Importing this package does not import vLLM.
"""

from tokenwire_server.simulated_device.model_folder import write_model_folder
from tokenwire_server.simulated_device.options import SimulatedDeviceError, SimulatedDeviceOptions, parse
from tokenwire_server.simulated_device.setup import configure, unsupported

__all__ = [
    "SimulatedDeviceError",
    "SimulatedDeviceOptions",
    "configure",
    "parse",
    "unsupported",
    "write_model_folder",
]
