"""Converts the downloaded GGUF file to the format of transformers, which vLLM reads."""

import importlib.util
import tempfile
from pathlib import Path

from tokenwire_server.demo_model.download import download
from tokenwire_server.demo_model.model import Progress


def convert(model: Path, progress: Progress) -> None:
    """Download the model and write its weights, configuration and tokenizer into the folder `model`.

    Raises:
        DemoModelError: the download failed.
        ModuleNotFoundError: a package of the extra `demo` is not installed.

    """
    # Before the download, so that a missing package is reported at once.
    for package in ("accelerate", "gguf", "torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with tempfile.TemporaryDirectory(prefix="download-", dir=model.parent) as folder:
        gguf = download(Path(folder), progress)
        progress("converting the model to bfloat16 (270 MB, about 20 seconds)")
        _write_model(gguf, model)


def _write_model(gguf: Path, model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    # `progress` is the only output; failures are exceptions.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    weights = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # Without it the weights stay in GGUF's quantized blocks, which cannot be saved.
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    weights.save_pretrained(model)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(model)
    # safetensors creates files with mode 0600, but a cache may be shared between users.
    for path in model.iterdir():
        path.chmod(0o644)
