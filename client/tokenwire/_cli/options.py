"""Options that several sub-commands share."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

import grpc
import msgspec
import typer

from tokenwire._channel import DEFAULT_TARGET
from tokenwire._client import AsyncClient
from tokenwire._sampling_params import SamplingParams


class Connect(Protocol):
    """Makes a client of the server given by the options, or of another server with the same options."""

    def __call__(self, target: str | None = None) -> AsyncClient:
        """Make a client. `target` None: that of the options."""
        ...


_SERVER = "Server"
_SAMPLING = "Sampling"


def connect(
    *,
    target: Annotated[
        str,
        typer.Option(
            envvar="TOKENWIRE_TARGET",
            metavar="TARGET",
            help="host:port, grpc://host:port or unix:/path.",
            rich_help_panel=_SERVER,
        ),
    ] = DEFAULT_TARGET,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TOKENWIRE_TOKEN",
            show_envvar=True,
            metavar="TOKEN",
            help="Bearer token; use the variable to keep it out of the process list.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Use TLS; implied by the options for certificates.", rich_help_panel=_SERVER)
    ] = False,
    ca_cert: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="CA certificates to trust in place of the system's.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    client_cert: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Client certificate.", rich_help_panel=_SERVER),
    ] = None,
    client_key: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Private key of the client certificate.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    http_proxy: Annotated[
        bool,
        typer.Option(
            "--http-proxy",
            help="Connect through the HTTP proxy in grpc_proxy, https_proxy or http_proxy, which is not used otherwise.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
) -> Connect:
    """Make clients from the connection options. Raises typer.BadParameter."""
    if (client_cert is None) != (client_key is None):
        raise typer.BadParameter("--client-cert and --client-key go together")
    credentials = None
    if tls or ca_cert is not None or client_cert is not None:
        credentials = grpc.ssl_channel_credentials(
            None if ca_cert is None else ca_cert.read_bytes(),
            None if client_key is None else client_key.read_bytes(),
            None if client_cert is None else client_cert.read_bytes(),
        )
    named = target

    def make(target: str | None = None) -> AsyncClient:
        try:
            return AsyncClient(
                named if target is None else target,
                token=token,
                credentials=credentials,
                enable_http_proxy=http_proxy,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return make


def sampling_params(
    *,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of tokens to generate.", rich_help_panel=_SAMPLING)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Sampling temperature; 0 is greedy.", rich_help_panel=_SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Cumulative probability of the tokens to sample from.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of the random number generator.", rich_help_panel=_SAMPLING)
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Other fields of SamplingParams: \'{"min_tokens": 4, "logprobs": 2}\'.',
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
) -> SamplingParams:
    """Make the sampling parameters from the options. Raises typer.BadParameter."""
    named = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    try:
        fields = {} if params is None else msgspec.json.decode(params, type=dict[str, Any])
        unknown = fields.keys() - set(SamplingParams.__struct_fields__)
        if unknown:
            raise typer.BadParameter(f"--params: SamplingParams has no {min(unknown)!r}")
        fields |= {name: value for name, value in named.items() if value is not None}
        return msgspec.convert(fields, SamplingParams, str_keys=True)
    except msgspec.MsgspecError as error:
        raise typer.BadParameter(f"--params: {error}") from None


def with_options(parameter: str, build: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by the options of `build`, whose result becomes the argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = inspect.signature(build, eval_str=True).parameters
        signature = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            built = build(**{name: values.pop(name) for name in options})
            command(**values, **{parameter: built})

        own = [value for name, value in signature.parameters.items() if name != parameter]
        # typer reads both attributes.
        run.__signature__ = signature.replace(parameters=[*own, *options.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {value.name: value.annotation for value in (*own, *options.values())}
        return run

    return decorate
