"""`tokenwire health`: whether the server takes requests."""

from typing import Annotated

import typer

from tokenwire._cli.options import Connect, connect, with_options
from tokenwire._cli.run import FAILED, run
from tokenwire._health import HealthStatus


@with_options("server", connect)
def health(
    *,
    server: Connect,
    service: Annotated[str, typer.Option(metavar="NAME", help="Ask for one service, not the whole server.")] = "",
    wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Wait until requests are taken, at most so long.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Most seconds for the answer.")] = 10.0,
) -> None:
    """Tell whether the server takes requests: prints SERVING and exits with 0, or another status and 1."""

    async def main() -> None:
        async with server() as client:
            if wait is not None:
                await client.wait_ready(timeout=wait, service=service)
            status = await client.health(service, timeout=timeout)
        typer.echo(status.name)
        if status is not HealthStatus.SERVING:
            raise typer.Exit(FAILED)

    run(main())
