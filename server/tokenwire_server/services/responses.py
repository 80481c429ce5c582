"""Converts the engine's outputs to the response messages of Generate and GenerateStream."""

from collections.abc import Iterable

from tokenwire.v1 import engine_service_pb2 as pb
from tokenwire.v1.generation_pb2 import SequenceOutput
from tokenwire_server.conversion.outputs import Chunk, fill_request_end
from tokenwire_server.conversion.request import EngineRequest


def unary(request: EngineRequest, chunk: Chunk) -> pb.GenerateResponse:
    """Return the response of Generate; a request that does not stream has exactly one output."""
    response = pb.GenerateResponse(request_id=request.request_id, outputs=chunk.outputs)
    if len(chunk.outputs) > 1:
        response.outputs.sort(key=_index)
    _fill_first(response, request, chunk)
    _fill_last(response, request, chunk, sum(len(output.token_ids) for output in chunk.outputs))
    return response


class StreamAnswer:
    """Converts outputs to the responses of a GenerateStream call."""

    done = False
    """Always False: only the engine ends the request."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._is_first = True
        self._completion_tokens = 0

    def take(self, chunk: Chunk) -> Iterable[pb.GenerateStreamResponse]:
        """Return the response for an output."""
        response = pb.GenerateStreamResponse(outputs=chunk.outputs)
        if self._is_first:
            self._is_first = False
            response.request_id = self._request.request_id
            _fill_first(response, self._request, chunk)
        for output in chunk.outputs:
            self._completion_tokens += len(output.token_ids)
        if chunk.request_end is not None:
            _fill_last(response, self._request, chunk, self._completion_tokens)
        return (response,)


def _index(output: SequenceOutput) -> int:
    return output.index


def _fill_first(
    response: pb.GenerateResponse | pb.GenerateStreamResponse, request: EngineRequest, chunk: Chunk
) -> None:
    if chunk.prompt_logprobs is not None:
        response.prompt_logprobs.CopyFrom(chunk.prompt_logprobs)
    if request.return_prompt_token_ids:
        response.prompt_token_ids.extend(request.prompt_token_ids)


def _fill_last(
    response: pb.GenerateResponse | pb.GenerateStreamResponse,
    request: EngineRequest,
    chunk: Chunk,
    completion_tokens: int,
) -> None:
    assert chunk.request_end is not None
    fill_request_end(response, chunk.request_end, len(request.prompt_token_ids), completion_tokens)
