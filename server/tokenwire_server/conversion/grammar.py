"""Checks of a grammar, with the parser's own words for what is wrong."""

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
    """Check a request's grammar as the engine would, which does not say that it is the grammar which is wrong.

    Args:
        params: the converted request.
        message: the grammar.
        path: path of `message` in the request message.
        model_config: the engine's model.
        config: the engine's options for structured outputs.
        tokenizer: the model's tokenizer; None where the engine has none, which is refused.

    Raises:
        RequestError: a parser refuses the grammar, INVALID_FIELD, or an option is not the engine's own, UNSUPPORTED_FIELD.

    """
    _check_options(config, message, path)
    try:
        # vLLM checks a grammar nowhere else.
        params._validate_structured_outputs(model_config, config, tokenizer)  # noqa: SLF001
    except (VLLMClientError, ValueError) as error:  # some of the parsers raise the latter
        # vLLM gives some of the parsers' messages as the cause only.
        text, cause = str(error), str(error.__cause__ or "")
        if cause and cause not in text:
            text = f"{text} {cause}"
        raise invalid_field(f"{path}.{message.WhichOneof('constraint')}", text or type(error).__name__) from error


def _check_options(config: StructuredOutputsConfig, message: StructuredOutputsParams, path: str) -> None:
    # vLLM takes these with a request, but its parsers read only the engine's configuration.
    for option in ("disable_any_whitespace", "disable_additional_properties"):
        if message.HasField(option) and getattr(message, option) != getattr(config, option):
            raise unsupported_field(
                f"{path}.{option}", f"must be {getattr(config, option)} or left out; see --structured-outputs-config"
            )
    if message.HasField("whitespace_pattern"):
        raise unsupported_field(f"{path}.whitespace_pattern", "vLLM's parsers do not honour it")
