"""LoRA adapters: from `--lora-modules` to the engine's LoRARequest."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm.lora.request import LoRARequest

from tokenwire_server.config import AdapterPath


class AdapterError(ValueError):
    """A LoRA adapter cannot be loaded."""

    def __init__(self, module: AdapterPath | LoRARequest, reason: str) -> None:
        name = module.lora_name if isinstance(module, LoRARequest) else module.name
        super().__init__(f"LoRA adapter {name!r} ({module.path}): {reason}")


def to_adapters(modules: Iterable[AdapterPath], base_names: Sequence[str]) -> list[LoRARequest]:
    """Return the engine's LoRARequests for `--lora-modules`; their integer ids count from 1.

    Args:
        modules: the parsed option.
        base_names: names of the base model, which adapters must not use.

    Raises:
        AdapterError: a name is missing or already in use, or a folder does not exist or contains no adapter.

    """
    adapters: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules, 1):
        if not module.name or not module.path:
            raise AdapterError(module, "needs a name and a path")
        if module.name in base_names:
            raise AdapterError(module, "the base model has this name")
        if module.name in adapters:
            raise AdapterError(module, "another adapter has this name")
        _check_folder(module)
        adapters[module.name] = LoRARequest(
            module.name,
            number,
            module.path,
            base_model_name=module.base_model_name if module.base_model_name in base_names else None,
            is_3d_lora_weight=module.is_3d_lora_weight,
        )
    return list(adapters.values())


def _check_folder(module: AdapterPath) -> None:
    # A path that is not a local folder may be a name on the Hugging Face Hub, which vLLM resolves at load time.
    folder = Path(module.path).expanduser()
    if not folder.exists():
        if module.path.startswith(("/", "./", "../", "~")):
            raise AdapterError(module, "the folder does not exist")
    elif not (folder / "adapter_config.json").is_file():
        raise AdapterError(module, "the folder contains no adapter_config.json")
