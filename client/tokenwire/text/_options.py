"""The options of a completion, validated and split into text options and generation options."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenwire._errors import FieldViolation
from tokenwire._input import GenerationOptions
from tokenwire._sampling_params import SamplingParams
from tokenwire._wire import invalid


class TextOptions(GenerationOptions, total=False):
    """Keyword arguments of `TextClient.complete` and `stream`, in addition to `GenerationOptions`."""

    stop: str | Sequence[str] | None
    """Stop string, or several of them, none of them empty. None: no stop strings."""
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
    """The validated options of one completion. Raises InvalidArgumentError."""

    def __init__(self, params: SamplingParams | None, options: TextOptions) -> None:
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
        self.add_special_tokens = options.get("add_special_tokens", True)
        """Whether a text prompt gets special tokens."""
        self.template_options = options.get("template_options")
        """Keyword arguments for the chat template. None: no arguments."""
        own = TextOptions.__annotations__.keys() - GenerationOptions.__annotations__.keys()
        self.generation = cast("GenerationOptions", {name: value for name, value in options.items() if name not in own})
        """The options that are sent in the request."""


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
