"""LoRA adapters, from the command line to the engine."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.lora.request import LoRARequest


class AdapterError(ValueError):
    """An adapter that requests could not use."""

    def __init__(self, module: LoRAModulePath | LoRARequest, fault: str) -> None:
        name = module.lora_name if isinstance(module, LoRARequest) else module.name
        super().__init__(f"LoRA adapter {name!r} ({module.path}): {fault}")


def to_adapters(modules: Iterable[LoRAModulePath], base_names: Sequence[str]) -> list[LoRARequest]:
    """Return the adapters of `--lora-modules` in the engine's form.

    Args:
        modules: what the option says.
        base_names: names of the base model.

    Raises:
        AdapterError: a name is taken, or a folder is not there.

    """
    adapters: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules, 1):
        if not module.name or not module.path:
            raise AdapterError(module, "needs a name and a path")
        if module.name in base_names:
            raise AdapterError(module, "the base model has that name")
        if module.name in adapters:
            raise AdapterError(module, "another adapter has that name")
        _check_folder(module)
        adapters[module.name] = LoRARequest(
            module.name,
            number,
            module.path,
            base_model_name=module.base_model_name if module.base_model_name in base_names else None,
            is_3d_lora_weight=module.is_3d_lora_weight,
        )
    return list(adapters.values())


def _check_folder(module: LoRAModulePath) -> None:
    # What is no folder may be a name on the hub, which vLLM resolves when it loads the adapter.
    folder = Path(module.path).expanduser()
    if not folder.exists():
        if module.path.startswith(("/", "./", "../", "~")):
            raise AdapterError(module, "there is no such folder")
    elif not (folder / "adapter_config.json").is_file():
        raise AdapterError(module, "has no adapter_config.json")
