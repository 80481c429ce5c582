"""What AsyncLLM itself answers, in a process without gRPC or tokenwire: `python reference.py JOB.json ANSWER.json`.

A job has the arguments of `vllm serve` and requests, each with a prompt and vLLM's sampling parameters, and the folder
of a LoRA adapter where it is for one. The tokenizer is loaded, as `vllm serve` does it.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


async def answer(llm: AsyncLLM, name: str, request: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(**request["params"], output_kind=RequestOutputKind.FINAL_ONLY)
    final = None
    adapter = LoRARequest("adapter", 1, request["adapter"]) if "adapter" in request else None
    async for output in llm.generate(tokens_input(request["prompt"]), params, name, lora_request=adapter):
        final = output
    assert final is not None
    completion = final.outputs[0]
    entries = list(completion.logprobs or ())
    sampled = [entry[token] for entry, token in zip(entries, completion.token_ids, strict=True)]
    k = params.logprobs or 0
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": [logprob.logprob for logprob in sampled],
        "top_token_ids": [
            token for entry in entries for token in sorted(entry, key=lambda token: entry[token].rank)[:k]
        ],
        "cumulative_logprob": completion.cumulative_logprob,
    }


async def run(job: dict[str, Any]) -> dict[str, Any]:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parser.parse_args(job["engine_arguments"])))
    try:
        return {name: await answer(llm, name, request) for name, request in job["requests"].items()}
    finally:
        llm.shutdown()


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(asyncio.run(run(json.loads(job.read_text())))))


if __name__ == "__main__":
    main()
