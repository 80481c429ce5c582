"""Checks of a grammar, with the parser's own words for what is wrong."""

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from tokenwire.v1.sampling_params_pb2 import StructuredOutputsParams
from tokenwire_server.errors import invalid_field, unsupported_field


def check_grammar(llm: AsyncLLM, params: SamplingParams, message: StructuredOutputsParams, path: str) -> None:
    """Check a request's grammar as the engine would, which does not say that it is the grammar which is wrong.

    Args:
        llm: the engine.
        params: the converted request.
        message: the grammar.
        path: path of `message` in the request message.

    Raises:
        RequestError: a parser refuses the grammar, INVALID_FIELD, or an option is not the engine's own, UNSUPPORTED_FIELD.

    """
    processor = llm.input_processor
    _check_options(processor.structured_outputs_config, message, path)
    try:
        params._validate_structured_outputs(  # noqa: SLF001  # vLLM checks a grammar nowhere else
            llm.model_config, processor.structured_outputs_config, processor.tokenizer
        )
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
