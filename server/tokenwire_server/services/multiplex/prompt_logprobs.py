"""Splits prompt log probabilities into messages small enough not to delay the stream's other requests."""

from collections.abc import Iterator

from tokenwire.v1 import logprobs_pb2
from tokenwire.v1 import multiplex_pb2 as pb

VALUES_PER_PART = 16_384
"""Maximum number of top tokens in a part: about 150 kB on the wire."""


def parts(handle: int, message: logprobs_pb2.PromptLogprobs) -> Iterator[pb.MultiplexPromptLogprobs]:
    """Yield the prompt log probabilities of a request in parts, in order of position."""
    k = message.top_k
    positions = max(1, VALUES_PER_PART // max(1, k))
    total = len(message.logprobs)
    for start in range(0, total, positions) or (0,):
        end = min(start + positions, total)
        part = pb.MultiplexPromptLogprobs(handle=handle)
        part.prompt_logprobs.offset = message.offset + start
        part.prompt_logprobs.top_k = k
        part.prompt_logprobs.logprobs.extend(message.logprobs[start:end])
        part.prompt_logprobs.ranks.extend(message.ranks[start:end])
        part.prompt_logprobs.top_token_ids.extend(message.top_token_ids[start * k : end * k])
        part.prompt_logprobs.top_logprobs.extend(message.top_logprobs[start * k : end * k])
        if end == total:
            part.prompt_logprobs.token_id_logprobs.extend(message.token_id_logprobs)
        yield part
