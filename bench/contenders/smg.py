"""smg-grpc-servicer in vLLM's gRPC launcher, called with token ids through the generated stub of smg-grpc-proto."""

import asyncio
import itertools
import time

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from typing_extensions import override

from bench.cases import Case
from bench.contenders.base import Contender
from bench.measure import Received


class SmgContender(Contender):
    """One call per request."""

    _channel: grpc.aio.Channel

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @override
    async def open(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)

    @override
    async def run(self, case: Case, prompts: list[list[int]], received: Received) -> None:
        params = pb.SamplingParams(
            temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True, logprobs=case.logprobs
        )
        await asyncio.gather(
            *(self._one(case, prompt, params, number, received) for number, prompt in enumerate(prompts))
        )

    @override
    async def close(self) -> None:
        await self._channel.close()

    async def _one(
        self, case: Case, prompt: list[int], params: pb.SamplingParams, number: int, received: Received
    ) -> None:
        tokens, times, logprobs = received.tokens[number], received.times[number], received.logprobs[number]
        request = pb.GenerateRequest(
            request_id=f"smg-{next(self._numbers)}",
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=params,
            stream=not case.unary,
        )
        async for message in self._stub.Generate(request):
            if message.HasField("chunk"):
                chunk = message.chunk
                if chunk.token_ids:
                    times.append(time.perf_counter())
                    tokens.extend(chunk.token_ids)
                if chunk.HasField("output_logprobs"):
                    logprobs.extend(chunk.output_logprobs.token_logprobs)
            elif case.unary:
                # In a stream, this message repeats all tokens.
                times.append(time.perf_counter())
                tokens.extend(message.complete.output_ids)


def make() -> SmgContender:
    """Create the contender."""
    return SmgContender()
