"""`tokenwire abort`: abort requests by id."""

from typing import Annotated

import typer

from tokenwire._abort import AbortOutcome
from tokenwire._cli.options import Connect, connect, with_options
from tokenwire._cli.output import print_json
from tokenwire._cli.run import FAILED, run


@with_options("server", connect)
def abort(
    request_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the requests.")],
    *,
    server: Connect,
    remember: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Also abort requests with unknown ids that arrive within this time."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Abort requests and return when the engine has aborted them.

    Prints each id with its outcome: ABORTED, ALREADY_FINISHED, REMEMBERED or NOT_FOUND. Exits with 1 if an id was not
    found.
    """

    async def main() -> None:
        async with server() as client:
            results = await client.abort(request_ids, remember_unknown_for=remember)
        if json:
            print_json(results)
        else:
            for result in results:
                typer.echo(f"{result.request_id} {result.outcome.name}")
        if any(result.outcome is AbortOutcome.NOT_FOUND for result in results):
            raise typer.Exit(FAILED)

    run(main())
