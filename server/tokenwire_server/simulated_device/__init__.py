"""The simulated device: the real AsyncLLM, EngineCore and scheduler, with no model and no GPU.

A custom vLLM executor stands where the worker processes are. The model's folder needs only a config.json; tokens and
log probabilities follow the formula in `formula`, so that a caller knows them beforehand. `options` says what can be
set, `setup` puts it into vLLM's engine arguments, and `step_log` reads what the device was given, step by step.

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
