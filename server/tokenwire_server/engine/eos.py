"""The id of the tokenizer's EOS token, found without loading the tokenizer."""

import logging
from typing import Any

from vllm.config import ModelConfig
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

logger = logging.getLogger(__name__)


def eos_token_id(model_config: ModelConfig) -> int | None:
    """Return the id of the tokenizer's EOS token; None if the model defines none.

    `vllm serve` uses the `eos_token` of the tokenizer that it loads. Tokens-only mode loads no tokenizer, so the id is
    read from the tokenizer's files: tokenizer_config.json names the token, and its id is in the same file or in
    tokenizer.json. Without these files, the id is the `eos_token_id` of config.json.
    """
    source, revision = model_config.tokenizer, model_config.tokenizer_revision
    config = get_hf_file_to_dict("tokenizer_config.json", source, revision) or {}
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str):
        found = _in_added_tokens(content, config)
        if found is None:
            found = _in_tokenizer(content, get_hf_file_to_dict("tokenizer.json", source, revision) or {})
        if found is not None:
            return found
        logger.warning(
            "the tokenizer files do not contain the id of the EOS token %r; using eos_token_id of config.json", content
        )
    ids = getattr(model_config.hf_text_config, "eos_token_id", None)
    if isinstance(ids, list):
        return ids[0] if ids else None
    return ids if isinstance(ids, int) else None


def _in_added_tokens(content: str, config: dict[str, Any]) -> int | None:
    for number, entry in config.get("added_tokens_decoder", {}).items():
        if entry.get("content") == content:
            return int(number)
    return None


def _in_tokenizer(content: str, tokenizer: dict[str, Any]) -> int | None:
    for entry in tokenizer.get("added_tokens", ()):
        if entry.get("content") == content:
            return int(entry["id"])
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    # The vocabulary of a Unigram model is a list of [piece, score] pairs instead of a mapping.
    if isinstance(vocabulary, list):
        return next((i for i, (piece, _) in enumerate(vocabulary) if piece == content), None)
    found = vocabulary.get(content)
    return found if isinstance(found, int) else None
