"""Checks of a grammar, with the parser's own words for what is wrong."""

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from tokenwire.v1.sampling_params_pb2 import StructuredOutputsParams
from tokenwire_server.errors import invalid_field


def check_grammar(llm: AsyncLLM, params: SamplingParams, message: StructuredOutputsParams, path: str) -> None:
    """Check a request's grammar as the engine would, which does not say that it is the grammar which is wrong.

    Args:
        llm: the engine.
        params: the converted request.
        message: the grammar.
        path: path of `message` in the request message.

    Raises:
        RequestError: a parser refuses the grammar, INVALID_FIELD.

    """
    processor = llm.input_processor
    try:
        params._validate_structured_outputs(  # noqa: SLF001  # vLLM checks a grammar nowhere else
            llm.model_config, processor.structured_outputs_config, processor.tokenizer
        )
    except Exception as error:  # it runs parsers of other projects, on nothing but the caller's text
        # vLLM gives some of the parsers' messages as the cause only.
        text, cause = str(error), str(error.__cause__ or "")
        if cause and cause not in text:
            text = f"{text} {cause}"
        raise invalid_field(f"{path}.{message.WhichOneof('constraint')}", text or type(error).__name__) from error
