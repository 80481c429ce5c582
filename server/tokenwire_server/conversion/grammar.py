"""Checks the grammar of structured outputs and returns the grammar parser's message to the client."""

from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from tokenwire.v1.sampling_params_pb2 import StructuredOutputsParams
from tokenwire_server.errors import invalid_field, unsupported_field


def check_grammar(
    params: SamplingParams,
    message: StructuredOutputsParams,
    path: str,
    *,
    model_config: ModelConfig,
    config: StructuredOutputsConfig,
    tokenizer: TokenizerLike | None,
) -> None:
    """Check the grammar of a request before it reaches the engine, whose own error does not name the field.

    Args:
        params: the request's sampling parameters in vLLM's form.
        message: the contract's structured outputs parameters.
        path: path of `message` in the request message, for errors.
        model_config: the engine's model configuration.
        config: the engine's structured outputs configuration.
        tokenizer: the model's tokenizer; None without one, which vLLM rejects.

    Raises:
        RequestError: INVALID_FIELD, the parser rejects the grammar; UNSUPPORTED_FIELD, an option differs from the
            engine's configuration.

    """
    _check_options(config, message, path)
    try:
        # The only place where vLLM validates a grammar.
        params._validate_structured_outputs(model_config, config, tokenizer)  # noqa: SLF001
    except (VLLMClientError, ValueError) as error:  # some of the parsers raise ValueError
        # vLLM keeps the message of some parsers only as the cause of its own error.
        text, cause = str(error), str(error.__cause__ or "")
        if cause and cause not in text:
            text = f"{text} {cause}"
        raise invalid_field(f"{path}.{message.WhichOneof('constraint')}", text or type(error).__name__) from error


def _check_options(config: StructuredOutputsConfig, message: StructuredOutputsParams, path: str) -> None:
    # vLLM accepts these options per request, but its grammar backends read only the engine's configuration.
    for option in ("disable_any_whitespace", "disable_additional_properties"):
        if message.HasField(option) and getattr(message, option) != getattr(config, option):
            raise unsupported_field(
                f"{path}.{option}", f"must be {getattr(config, option)} or unset; see --structured-outputs-config"
            )
    if message.HasField("whitespace_pattern"):
        raise unsupported_field(f"{path}.whitespace_pattern", "vLLM's grammar backends ignore it")
