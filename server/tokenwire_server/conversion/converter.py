"""Conversion of requests for one engine, with the checks that depend on it."""

from collections.abc import Callable, Mapping

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from tokenwire.v1.generation_pb2 import GenerationInput
from tokenwire_server.conversion.grammar import check_grammar
from tokenwire_server.conversion.legal_tokens import check_legal_tokens
from tokenwire_server.conversion.limits import RequestLimits
from tokenwire_server.conversion.request import EngineRequest, to_engine_request
from tokenwire_server.errors import invalid_field, unsupported_field


class RequestConverter:
    """Checks requests against one engine and converts them."""

    def __init__(
        self,
        processor: InputProcessor,
        limits: RequestLimits,
        adapters: Mapping[str, LoRARequest],
        *,
        refused_field: Callable[[SamplingParams], str | None] | None,
        wants_deltas: Callable[[SamplingParams], bool],
    ) -> None:
        """Make a converter.

        Args:
            processor: vLLM's input processor, with its own checks.
            limits: the engine's limits and features.
            adapters: LoRA adapters by name.
            refused_field: returns the name of the first sampling field that the device does not support; None if it
                supports all.
            wants_deltas: whether vLLM should return a request's outputs as they come even for a unary call, since the
                request's sink accumulates them.

        """
        self._processor = processor
        self._limits = limits
        self._adapters = adapters
        self._refused_field = refused_field
        self._wants_deltas = wants_deltas
        # As in vLLM's SamplingParams.update_from_generation_config.
        more = processor.generation_config_fields.get("eos_token_id")
        ids = [more] if more is None or isinstance(more, int) else more
        self._eos_token_ids = frozenset({processor.renderer.get_eos_token_id(), *ids} - {None})

    def convert(
        self,
        message: GenerationInput,
        *,
        request_id: str,
        trace_headers: Mapping[str, str] | None = None,
        stream: bool,
        path: str = "input",
    ) -> EngineRequest:
        """Check and convert a request.

        Args:
            message: the request, which has passed `check_input`.
            request_id: the caller's id or a server-generated one.
            trace_headers: W3C trace context from the call's metadata; None if there is none.
            stream: whether the caller receives outputs as they are generated, rather than all at once.
            path: path of `message` in the request message, for errors.

        Returns:
            The request in vLLM's terms.

        Raises:
            RequestError: the request is refused.

        """
        request = to_engine_request(
            message,
            self._limits,
            self._adapters,
            request_id=request_id,
            trace_headers=trace_headers,
            stream=stream,
            path=path,
        )
        params, path = request.params, f"{path}.sampling_params"
        if self._refused_field is not None and (name := self._refused_field(params)) is not None:
            raise unsupported_field(f"{path}.{name}", "the simulated device does not support it")
        check_legal_tokens(params, self._limits.vocab_size, self._eos_token_ids, path)
        if params.structured_outputs is not None:
            check_grammar(
                params,
                message.sampling_params.structured_outputs,
                f"{path}.structured_outputs",
                model_config=self._processor.model_config,
                config=self._processor.structured_outputs_config,
                tokenizer=self._processor.tokenizer,
            )
        try:
            # Custom logits processors, which read extra_args; vLLM does not report which of them refused the request.
            self._processor.validate_logits_processors_params(params)
        except (VLLMClientError, ValueError) as error:
            raise invalid_field(f"{path}.extra_args_json", f"refused by a logits processor: {error}") from error
        if self._wants_deltas(params):
            params.output_kind = RequestOutputKind.DELTA
        return request
