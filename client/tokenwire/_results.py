"""What the generating calls return: a result, or the deltas of a stream."""

from typing import Any

import msgspec

from tokenwire import _wire
from tokenwire._logprobs import PromptLogprobs
from tokenwire._sequence import FinishReason, SequenceOutput
from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2
from tokenwire.v1.multiplex_pb2 import MultiplexFinish


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of a request, over all its sequences."""

    prompt_tokens: int
    """Number of prompt tokens."""
    completion_tokens: int
    """Number of generated tokens, over all sequences."""
    cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache or fetched by a KV connector. None: unknown."""

    @classmethod
    def from_proto(cls, message: generation_pb2.Usage) -> "Usage":
        """Convert from the protobuf message."""
        return cls(
            prompt_tokens=message.prompt_tokens,
            completion_tokens=message.completion_tokens,
            cached_tokens=_wire.present(message, "cached_tokens"),
        )


NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0)
"""The usage of a result for which the server sent none."""


class Timing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Durations of a request's phases, in seconds, by the engine's clock. None: unknown."""

    queue_time: float | None = None
    """Seconds in the engine's queue."""
    time_to_first_token: float | None = None
    """Seconds from arrival to the first token."""
    total_time: float | None = None
    """Seconds from arrival to the last token."""

    @classmethod
    def from_proto(cls, message: generation_pb2.Timing) -> "Timing":
        """Convert from the protobuf message."""
        return cls(
            queue_time=_wire.present_seconds(message, "queue_time"),
            time_to_first_token=_wire.present_seconds(message, "time_to_first_token"),
            total_time=_wire.present_seconds(message, "total_time"),
        )


class _Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields that a result and a delta share."""

    request_id: str
    """The request's id, for `abort`."""
    outputs: list[SequenceOutput]
    """The sequences: all of them in a result, those with new tokens or a finish in a delta."""
    timing: Timing | None = None
    """Durations. None: not reported by the engine, or not the last delta."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt tokens. None: not requested, or not the first delta."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, with return_prompt_token_ids. None: not requested, or not the first delta."""
    kv_transfer_params_json: str | None = None
    """Parameters from the engine's KV connector: JSON, unchanged. None: no parameters, or not the last delta."""
    ec_transfer_params_json: str | None = None
    """Parameters from the engine's encoder-cache connector: JSON, unchanged. None: no parameters, or not the last
    delta."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the only sequence. Raises ValueError if n > 1: use `outputs`."""
        only = self._only()
        return [] if only is None else only.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the only sequence finished; None if it has not. Raises ValueError if n > 1: use `outputs`."""
        only = self._only()
        return None if only is None else only.finish_reason

    def _only(self) -> SequenceOutput | None:
        if not self.outputs:
            return None
        if len(self.outputs) > 1 or self.outputs[0].index:
            raise ValueError("the request has several sequences: use outputs")
        return self.outputs[0]


class GenerateResult(_Answer, frozen=True, kw_only=True, gc=False):
    """The complete output of a request."""

    usage: Usage
    """Token counts."""

    @classmethod
    def from_proto(cls, message: pb.GenerateResponse) -> "GenerateResult":
        """Convert from the protobuf message."""
        end = request_end(message)
        end.setdefault("usage", NO_USAGE)
        outputs = [SequenceOutput.from_proto(output) for output in message.outputs]
        return cls(request_id=message.request_id, outputs=outputs, **_prompt(message), **end)


class Delta(_Answer, frozen=True, kw_only=True, gc=False):
    """What a stream has received since the previous delta: any number of tokens, of any of the sequences."""

    usage: Usage | None = None
    """Token counts. None: not the last delta."""

    @classmethod
    def from_proto(cls, message: pb.GenerateStreamResponse, request_id: str) -> "Delta":
        """Convert from the protobuf message. `request_id`: the id, which only the first message of a stream has."""
        outputs = [SequenceOutput.from_proto(output) for output in message.outputs]
        if not message.request_id and not message.HasField("usage"):
            # Messages between the first and the last have only tokens.
            return cls(request_id=request_id, outputs=outputs)
        return cls(
            request_id=message.request_id or request_id, outputs=outputs, **_prompt(message), **request_end(message)
        )


def request_end(message: pb.GenerateResponse | pb.GenerateStreamResponse | MultiplexFinish) -> dict[str, Any]:
    """Convert the fields of a request's end, which all responses share with MultiplexFinish, without absent ones."""
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
    """Convert the fields about the prompt. In a stream, only the first message has them."""
    logprobs = message.prompt_logprobs
    return {
        "prompt_logprobs": PromptLogprobs.from_proto(logprobs) if message.HasField("prompt_logprobs") else None,
        "prompt_token_ids": list(message.prompt_token_ids) or None,
    }
