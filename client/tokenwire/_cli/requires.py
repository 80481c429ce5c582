"""Sub-commands that need packages of an extra."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def requires(hint: str) -> Iterator[None]:
    """End the command with one line, which has `hint`, if an import inside the block finds no package.

    A vLLM that is installed but has not what is imported is another version than those supported: the line names them.
    """
    try:
        yield
    except ImportError as error:
        name = error.name or ""
        if name.startswith("vllm."):
            message = f"vLLM {_version('vllm')} is not supported, since it has no {name}: install {_supported('vllm')}"
        elif not isinstance(error, ModuleNotFoundError) or name.partition(".")[0] in {
            "",
            "tokenwire",
            "tokenwire_server",
        }:
            # A bug of tokenwire itself keeps its traceback.
            raise
        else:
            message = f"this command needs the package {name}, which is not installed: {hint}"
        typer.echo(f"tokenwire: {message}", err=True)
        raise typer.Exit(2) from None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # vLLM's CPU build has another name
        return "as installed"


def _supported(package: str) -> str:
    """Return the requirement of an extra of tokenwire's, "vllm<0.34,>=0.32" for example."""
    try:
        requirements = importlib.metadata.requires("tokenwire") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    found = (requirement.partition(";")[0].strip() for requirement in requirements)
    return next((requirement for requirement in found if requirement.startswith(package)), package)
