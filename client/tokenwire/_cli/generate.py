"""`tokenwire generate`: generate tokens for a prompt of token ids."""

import re
import sys
from typing import Annotated

import typer

from tokenwire._cli.options import Connect, connect, sampling_params, with_options
from tokenwire._cli.output import print_json, print_note, print_part
from tokenwire._cli.run import run
from tokenwire._results import Delta, GenerateResult
from tokenwire._sampling_params import SamplingParams

EXAMPLES = """
Examples:

tokenwire generate 504 3575 282 4649 314 --max-tokens 8 --temperature 0

echo '[504, 3575, 282]' | tokenwire generate --stream

tokenwire generate 504 3575 --json --params '{"n": 2, "logprobs": 1}'
"""


@with_options("server", connect)
@with_options("params", sampling_params)
def generate(
    ids: Annotated[
        list[int] | None,
        typer.Argument(metavar="ID...", help="Token ids of the prompt; read from standard input if there are none."),
    ] = None,
    *,
    server: Connect,
    params: SamplingParams,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they arrive.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON; with --stream, one per delta.")] = False,
    request_id: Annotated[str | None, typer.Option(metavar="ID", help="Id of the request, for `abort`.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the model or LoRA adapter.")] = None,
) -> None:
    """Generate tokens for a prompt of token ids and print the new ids, one line per sequence."""
    prompt = ids or _read_ids()

    async def main() -> None:
        async with server() as client:
            if stream:
                async with client.stream(prompt, params, request_id=request_id, model=model) as deltas:
                    async for delta in deltas:
                        _print_delta(delta, json=json)
                if not json:
                    typer.echo()
                return
            result = await client.generate(prompt, params, request_id=request_id, model=model)
        if json:
            print_json(result)
        else:
            _print_result(result)

    run(main())


def _read_ids() -> list[int]:
    if sys.stdin.isatty():
        raise typer.BadParameter("no token ids: pass them as arguments or on standard input")
    words = re.split(r"[\s,\[\]]+", sys.stdin.read().strip())
    try:
        return [int(word) for word in words if word]
    except ValueError as error:
        raise typer.BadParameter(f"standard input must contain only token ids: {error}") from None


def _print_delta(delta: Delta, *, json: bool) -> None:
    if json:
        print_json(delta)
        return
    for output in delta.outputs:
        prefix = f"{output.index}:" if output.index else ""
        print_part("".join(f"{prefix}{token_id} " for token_id in output.token_ids))


def _print_result(result: GenerateResult) -> None:
    for output in result.outputs:
        typer.echo(" ".join(map(str, output.token_ids)))
    reasons = ", ".join(
        "unfinished" if output.finish_reason is None else output.finish_reason for output in result.outputs
    )
    print_note(f"{reasons}; {result.usage.prompt_tokens} tokens in, {result.usage.completion_tokens} out")
