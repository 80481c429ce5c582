"""`tokenwire health`: whether the server accepts requests."""

from typing import Annotated

import typer

from tokenwire._cli.options import Connect, connect, with_options
from tokenwire._cli.run import FAILED, run
from tokenwire._health import HealthStatus


@with_options("server", connect)
def health(
    *,
    server: Connect,
    service: Annotated[str, typer.Option(metavar="NAME", help="Check one service, not the whole server.")] = "",
    wait: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Maximum number of seconds to wait until the server accepts requests."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Deadline of the call.")] = 10.0,
) -> None:
    """Check whether the server accepts requests: prints SERVING and exits with 0, or another status and 1."""

    async def main() -> None:
        async with server() as client:
            if wait is not None:
                await client.wait_ready(timeout=wait, service=service)
            status = await client.health(service, timeout=timeout)
        typer.echo(status.name)
        if status is not HealthStatus.SERVING:
            raise typer.Exit(FAILED)

    run(main())
