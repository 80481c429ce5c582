"""Answers of the generating calls: a whole result, or a stream's deltas."""

from typing import Any

import msgspec

from tokenwire import _wire
from tokenwire._logprobs import PromptLogprobs
from tokenwire._sequence import FinishReason, SequenceOutput
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2
from tokenwire.v1.multiplex_pb2 import MultiplexFinish


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of a request, all its sequences together."""

    prompt_tokens: int
    """Tokens in the prompt."""
    completion_tokens: int
    """Tokens generated, over all sequences."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache or fetched by a KV connector. None: not told."""

    @classmethod
    def from_proto(cls, message: generation_pb2.Usage) -> "Usage":
        """Convert the contract's message."""
        return cls(
            prompt_tokens=message.prompt_tokens,
            completion_tokens=message.completion_tokens,
            cached_tokens=_wire.present(message, "cached_tokens"),
        )


NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0)
"""What stands in for the usage that a server left out of a whole answer."""


class Timing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """When things happened to a request, in seconds, by the engine's clock; None: not known."""

    queue_time: float | None = None
    """Time in the engine's queue."""
    time_to_first_token: float | None = None
    """From arrival to the first token."""
    total_time: float | None = None
    """From arrival to the last token."""

    @classmethod
    def from_proto(cls, message: generation_pb2.Timing) -> "Timing":
        """Convert the contract's message."""
        return cls(
            queue_time=_wire.present_seconds(message, "queue_time"),
            time_to_first_token=_wire.present_seconds(message, "time_to_first_token"),
            total_time=_wire.present_seconds(message, "total_time"),
        )


class _Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a result and a delta have in common."""

    request_id: str
    """The request's id, for `abort`."""
    outputs: list[SequenceOutput]
    """The sequences: all of them in a result, those with something new in a delta."""
    timing: Timing | None = None
    """When things happened. None: not reported, or not a stream's last delta."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt's tokens. None: not asked for, or not a stream's first delta."""
    prompt_token_ids: list[int] | None = None
    """The prompt, where return_prompt_token_ids asks for it. None: not asked for, or not a stream's first delta."""
    kv_transfer_params_json: str | None = None
    """What the engine's KV connector gave back: JSON, verbatim. None: nothing, or not a stream's last delta."""
    ec_transfer_params_json: str | None = None
    """What the engine's encoder-cache connector gave back: JSON, verbatim. None: nothing, or not a stream's last
    delta."""

    @property
    def token_ids(self) -> list[int]:
        """The (new) tokens of a request with n = 1; ValueError where there is a sequence beside the first."""
        only = self._only()
        return [] if only is None else only.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why a request with n = 1 ended, None while it runs; ValueError where there is a sequence beside the first."""
        only = self._only()
        return None if only is None else only.finish_reason

    def _only(self) -> SequenceOutput | None:
        if not self.outputs:
            return None
        if len(self.outputs) > 1 or self.outputs[0].index:
            raise ValueError("several sequences: look at outputs")
        return self.outputs[0]


class GenerateResult(_Answer, frozen=True, kw_only=True, gc=False):
    """A request's whole answer."""

    usage: Usage
    """Token counts."""

    @classmethod
    def from_proto(cls, message: pb.GenerateResponse) -> "GenerateResult":
        """Convert the contract's message."""
        end = request_end(message)
        end.setdefault("usage", NO_USAGE)
        outputs = [SequenceOutput.from_proto(output) for output in message.outputs]
        return cls(request_id=message.request_id, outputs=outputs, **_prompt(message), **end)


class Delta(_Answer, frozen=True, kw_only=True, gc=False):
    """What is new in a stream since the delta before. May hold several tokens, also of several sequences."""

    usage: Usage | None = None
    """Token counts. None: not the stream's last delta."""

    @classmethod
    def from_proto(cls, message: pb.GenerateStreamResponse, request_id: str) -> "Delta":
        """Convert the contract's message; `request_id` stands in where only the stream's first message has it."""
        outputs = [SequenceOutput.from_proto(output) for output in message.outputs]
        if not message.request_id and not message.HasField("usage"):
            # Between the first message and the last there are tokens only.
            return cls(request_id=request_id, outputs=outputs)
        return cls(
            request_id=message.request_id or request_id, outputs=outputs, **_prompt(message), **request_end(message)
        )


def request_end(message: pb.GenerateResponse | pb.GenerateStreamResponse | MultiplexFinish) -> dict[str, Any]:
    """Convert the fields of a request's end, which the answers and MultiplexFinish share. Absent ones are left out."""
    has = message.HasField
    fields: dict[str, Any] = {}
    if has("usage"):
        fields["usage"] = Usage.from_proto(message.usage)
    if has("timing"):
        fields["timing"] = Timing.from_proto(message.timing)
    if has("kv_transfer_params_json"):
        fields["kv_transfer_params_json"] = message.kv_transfer_params_json
    if has("ec_transfer_params_json"):
        fields["ec_transfer_params_json"] = message.ec_transfer_params_json
    return fields


def _prompt(message: pb.GenerateResponse | pb.GenerateStreamResponse) -> dict[str, Any]:
    """Convert the fields about the prompt, which in a stream only the first message has."""
    logprobs = message.prompt_logprobs
    return {
        "prompt_logprobs": PromptLogprobs.from_proto(logprobs) if message.HasField("prompt_logprobs") else None,
        "prompt_token_ids": list(message.prompt_token_ids) or None,
    }
