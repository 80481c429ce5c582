"""`tokenwire info`: the engine's model, limits, features and versions."""

from typing import Annotated

import typer

from tokenwire._cli.options import Connect, connect, with_options
from tokenwire._cli.output import print_json, print_rows
from tokenwire._cli.run import run
from tokenwire._engine_info import EngineInfo


@with_options("server", connect)
def info(
    *,
    server: Connect,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON with all fields.")] = False,
) -> None:
    """Print the engine's model, limits, features and versions."""

    async def main() -> None:
        async with server() as client:
            engine = await client.engine_info()
        if json:
            print_json(engine)
        else:
            print_rows("engine", _rows(engine))

    run(main())


def _rows(engine: EngineInfo) -> list[tuple[str, str]]:
    limits, cache, parallelism = engine.limits, engine.kv_cache, engine.parallelism
    sizes = [parallelism.data_parallel_size, parallelism.tensor_parallel_size, parallelism.pipeline_parallel_size]
    rows = {
        "model": engine.model,
        "served as": ", ".join(engine.served_model_names),
        "adapters": ", ".join(adapter.name for adapter in engine.adapters),
        "context": _count(engine.max_model_len, "tokens"),
        "vocabulary": _count(engine.vocab_size, "ids"),
        "EOS": ", ".join(map(str, engine.eos_token_ids)),
        "dtype": engine.dtype,
        "running at once": _count(limits.max_num_seqs, "sequences"),
        "tokens in a step": _count(limits.max_num_batched_tokens, "tokens"),
        "queue": _count(limits.max_num_queued_reqs, "sequences"),
        "parallel": " x ".join("?" if size is None else str(size) for size in sizes) + " (data x tensor x pipeline)",
        "KV cache": _count(cache.num_blocks, f"blocks of {cache.block_size} tokens"),
        "KV connector": cache.kv_connector,
        "features": ", ".join(sorted(engine.features)),
        "versions": f"tokenwire {engine.tokenwire_version}, vLLM {engine.vllm_version or '?'}, "
        f"contract revision {engine.contract_revision}",
    }
    return [(name, value) for name, value in rows.items() if value]


def _count(number: int | None, unit: str) -> str | None:
    return None if number is None else f"{number:,} {unit}"
