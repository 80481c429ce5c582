"""From the engine's chunks to the response messages of Generate and GenerateStream."""

from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1 import generation_pb2
from tokenwire_server.conversion.outputs import Chunk, fill_closing


def unary(message: generation_pb2.GenerationInput, request_id: str, chunk: Chunk) -> pb.GenerateResponse:
    """Return the answer of Generate: the one chunk that an engine gives a request that does not stream."""
    response = pb.GenerateResponse(request_id=request_id, outputs=chunk.outputs)
    if len(chunk.outputs) > 1:
        response.outputs.sort(key=_index)
    _fill_first(response, message, chunk)
    _fill_last(response, message, chunk, sum(len(output.token_ids) for output in chunk.outputs))
    return response


class Stream:
    """Makes the messages of a GenerateStream call."""

    def __init__(self, message: generation_pb2.GenerationInput, request_id: str) -> None:
        self._message = message
        self._request_id: str | None = request_id
        self._completion_tokens = 0

    def next(self, chunk: Chunk) -> pb.GenerateStreamResponse:
        """Return the message for a chunk."""
        response = pb.GenerateStreamResponse(outputs=chunk.outputs)
        if self._request_id is not None:
            response.request_id = self._request_id
            self._request_id = None
            _fill_first(response, self._message, chunk)
        for output in chunk.outputs:
            self._completion_tokens += len(output.token_ids)
        if chunk.closing is not None:
            _fill_last(response, self._message, chunk, self._completion_tokens)
        return response


def _index(output: generation_pb2.SequenceOutput) -> int:
    return output.index


def _fill_first(
    response: pb.GenerateResponse | pb.GenerateStreamResponse, message: generation_pb2.GenerationInput, chunk: Chunk
) -> None:
    if chunk.prompt_logprobs is not None:
        response.prompt_logprobs.CopyFrom(chunk.prompt_logprobs)
    if message.return_prompt_token_ids:
        response.prompt_token_ids.extend(message.prompt_token_ids)


def _fill_last(
    response: pb.GenerateResponse | pb.GenerateStreamResponse,
    message: generation_pb2.GenerationInput,
    chunk: Chunk,
    completion_tokens: int,
) -> None:
    assert chunk.closing is not None
    fill_closing(response, chunk.closing, len(message.prompt_token_ids), completion_tokens)
