"""The options of a completion, validated and split into text options and generation options."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenwire._connection import Metadata
from tokenwire._errors import FieldViolation
from tokenwire._input import GenerationOptions
from tokenwire._sampling_params import SamplingParams
from tokenwire._wire import check_type, invalid


class CarrierOptions(GenerationOptions, total=False):
    """Keyword arguments of a `Carrier`: those of `AsyncClient.generate`."""

    timeout: float | None
    """The call's gRPC deadline, in seconds. None: no deadline. A Multiplex stream has none for a single request: use
    `max_time`."""
    metadata: Metadata | None
    """Metadata of the call, sent after the client's own. None: nothing is added. Requests of a Multiplex stream have
    that of the stream."""


class TextOptions(CarrierOptions, total=False):
    """Keyword arguments of `TextClient.complete` and `stream`, in addition to `CarrierOptions`."""

    stop: str | Sequence[str] | None
    """Stop string, or several of them, none of them empty. None: no stop strings. While special tokens are left out of
    the text, a stop string must not contain one: it would never match. Use `SamplingParams.stop_token_ids`."""
    include_stop_str_in_output: bool
    """Whether the text includes the stop string, or the text of the stop token. Default: False."""
    skip_special_tokens: bool
    """Whether special tokens are left out of the text. Default: True."""
    add_special_tokens: bool
    """Whether a text prompt gets BOS and other special tokens, if the model has them. Default: True."""
    template_options: Mapping[str, Any] | None
    """Keyword arguments of transformers' `apply_chat_template`: tools, documents, variables of the template. None: no
    arguments."""


class CompletionOptions:
    """The validated options of one completion."""

    def __init__(
        self, params: SamplingParams | None, options: TextOptions, special_tokens: Mapping[str, int] | None = None
    ) -> None:
        """Validate the options.

        Args:
            params: how to sample. None: the model's defaults.
            options: the options.
            special_tokens: ids of the tokenizer's special tokens, by their text. None: unknown.

        Raises:
            InvalidArgumentError: an option is invalid.

        """
        if params is not None:
            check_type("sampling_params", params, SamplingParams)
        self.params = SamplingParams() if params is None else params
        """The sampling parameters."""
        if self.params.n not in (None, 1):
            raise invalid(
                FieldViolation("n", f"must be 1, not {self.params.n}: start a separate request for each text")
            )
        self.stop = _stops(options.get("stop"))
        """The stop strings."""
        self.include_stop = options.get("include_stop_str_in_output", False)
        """Whether the text includes the stop string."""
        self.skip_special_tokens = options.get("skip_special_tokens", True)
        """Whether special tokens are left out of the text."""
        if self.skip_special_tokens:
            _check_visible(self.stop, special_tokens or {})
        self.add_special_tokens = options.get("add_special_tokens", True)
        """Whether a text prompt gets special tokens."""
        self.template_options = options.get("template_options")
        """Keyword arguments for the chat template. None: no arguments."""
        own = TextOptions.__annotations__.keys() - CarrierOptions.__annotations__.keys()
        self.generation = cast("CarrierOptions", {name: value for name, value in options.items() if name not in own})
        """The options of the call and of the request that it sends."""


def _check_visible(stops: Sequence[str], special_tokens: Mapping[str, int]) -> None:
    """Refuse stop strings that contain a special token, whose text is left out. Raises InvalidArgumentError."""
    wrong = [
        FieldViolation(
            f"stop[{position}]",
            f"must not contain the special token {token!r}, which skip_special_tokens leaves out of the text: use "
            f"stop_token_ids=[{token_id}], or skip_special_tokens=False",
        )
        for position, stop in enumerate(stops)
        for token, token_id in special_tokens.items()
        if token and token in stop
    ]
    if wrong:
        raise invalid(*wrong)


def _stops(stop: str | Sequence[str] | None) -> list[str]:
    stops: list[Any] = [stop] if isinstance(stop, str) else list(stop or ())
    wrong = [
        FieldViolation(f"stop[{position}]", f"must be a non-empty text, not {item!r}")
        for position, item in enumerate(stops)
        if not isinstance(item, str) or not item
    ]
    if wrong:
        raise invalid(*wrong)
    return stops
