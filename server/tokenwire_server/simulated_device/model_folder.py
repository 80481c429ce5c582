"""A model folder with only what the simulated device needs."""

import json
from pathlib import Path


def write_model_folder(
    path: str | Path, *, vocab_size: int = 32_000, max_position_embeddings: int = 32_768, eos_token_id: int | None = 2
) -> Path:
    """Write the config.json of a small Llama model.

    Args:
        path: the model folder; created if it does not exist.
        vocab_size: number of token ids.
        max_position_embeddings: maximum number of prompt and output tokens.
        eos_token_id: EOS id of the model; None for a model without one.

    Returns:
        The model folder.

    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
