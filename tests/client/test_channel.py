"""The channel: what its options do, and which addresses it takes."""

import asyncio
import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import tokenwire
from tokenwire import AsyncClient
from tokenwire._channel import channel_options
from tokenwire._target import grpc_target
from tokenwire.v1 import engine_service_pb2 as pb

Serve = Callable[..., Awaitable[str]]
LIMIT = 20.0

# A server that accepts calls of Multiplex and never answers them.
SILENT_SERVER = """
import asyncio, grpc

async def multiplex(requests, context):
    await asyncio.Event().wait()
    yield b""

async def main():
    server = grpc.aio.server()
    handlers = {"Multiplex": grpc.stream_stream_rpc_method_handler(multiplex)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("tokenwire.v1.EngineService", handlers)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


def test_grpc_knows_every_option() -> None:
    """gRPC ignores unknown names silently, so a typo would disable a protection."""
    spec = importlib.util.find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).read_bytes()
    missing = [name for name, _ in channel_options() if name.encode() + b"\0" not in library]
    assert not missing


def test_times_are_milliseconds() -> None:
    options = dict(channel_options(connect_timeout=1.5, keepalive_time=2, keepalive_timeout=0.0001))
    assert options["grpc.min_reconnect_backoff_ms"] == 1500
    assert options["grpc.keepalive_time_ms"] == 2000
    assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"] == 1


async def test_a_server_that_stops_answering_pings_is_unreachable() -> None:
    """FAULTS F2. gRPC's own limit for the answer to a ping is a minute, whatever keepalive_timeout is."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SILENT_SERVER, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), LIMIT))
        async with (
            asyncio.timeout(LIMIT),
            AsyncClient(f"127.0.0.1:{port}", keepalive_time=0.5, keepalive_timeout=0.5) as client,
            client.multiplex() as mux,
        ):
            stream = mux.submit([1])
            await mux._call._call.wait_for_connection()  # type: ignore[union-attr]
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(tokenwire.UnreachableError):
                await mux.wait_closed()
            with pytest.raises(tokenwire.UnreachableError):
                await stream.result()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": "http://127.0.0.1:{port}"},
        {"https_proxy": "http://127.0.0.1:{port}"},
        {"grpc_proxy": "http://127.0.0.1:{port}"},
        {
            "GRPC_ADDRESS_HTTP_PROXY": "127.0.0.1:{port}",
            "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "127.0.0.0/8",
        },
    ],
    ids=lambda variables: next(iter(variables)),
)
async def test_a_proxy_of_the_environment_is_used_only_if_asked_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """FAULTS D2."""

    async def info(_request: Any, _context: Any) -> pb.GetEngineInfoResponse:
        return pb.GetEngineInfoResponse()

    target = await serve(GetEngineInfo=info)
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    dialled = asyncio.Event()

    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(port=port))
    async with proxy:
        async with AsyncClient(target) as client:
            await client.engine_info(timeout=LIMIT)
        assert not dialled.is_set()
        async with AsyncClient(target, enable_http_proxy=True) as client:
            with pytest.raises(tokenwire.UnreachableError):
                await client.engine_info(timeout=LIMIT)
        assert dialled.is_set()


@pytest.mark.parametrize(
    ("target", "dialled"),
    [
        ("engine.example:7000", "engine.example:7000"),
        ("localhost", "localhost:50051"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("[::1]:7000", "[::1]:7000"),
        ("[::1]", "[::1]:50051"),
        ("::1", "[::1]:50051"),
        ("grpc://engine.example:7000", "engine.example:7000"),
        ("grpc://engine.example:7000/", "engine.example:7000"),
        ("GRPC://engine.example", "engine.example:50051"),
        ("dns:///engine.example:7000", "dns:///engine.example:7000"),
        ("dns:///engine.example", "dns:///engine.example:50051"),
        ("dns:engine.example", "dns:engine.example:50051"),
        ("dns://10.0.0.53/engine.example", "dns://10.0.0.53/engine.example:50051"),
        ("ipv4:10.0.0.1:7000,10.0.0.2", "ipv4:10.0.0.1:7000,10.0.0.2:50051"),
        ("ipv6:[::1]", "ipv6:[::1]:50051"),
        ("unix:/run/engine.sock", "unix:/run/engine.sock"),
        ("unix:engine.sock", "unix:engine.sock"),
        ("unix:///run/engine.sock", "unix:///run/engine.sock"),
        ("unix-abstract:engine", "unix-abstract:engine"),
        ("vsock:3:7000", "vsock:3:7000"),
        ("xds:///engine", "xds:///engine"),
    ],
)
def test_targets(target: str, dialled: str) -> None:
    """FAULTS D6."""
    assert grpc_target(target) == dialled


@pytest.mark.parametrize(
    "target",
    [
        "",
        " ",
        "http://localhost:50051",
        "HTTP://localhost:50051",
        "https://localhost",
        "tcp://localhost:50051",
        "grpcs://localhost:50051",
        "grpc://",
        "grpc://user@localhost",
        "grpc://localhost:50051/path",
        "tcp:localhost:50051",
        "localhost:",
        ":50051",
        "localhost:http",
        "localhost:0",
        "localhost:65536",
        "localhost:50051:50051",
        "local host",
        "/run/engine.sock",
        "unix:",
        "dns:///",
    ],
)
def test_what_is_no_target_is_refused_at_construction(target: str) -> None:
    """FAULTS D6."""
    with pytest.raises(ValueError, match="must be host:port or unix:path"):
        AsyncClient(target)
    with pytest.raises(ValueError, match="must be host:port or unix:path"):
        tokenwire.Client(target)


async def test_a_grpc_url_connects(serve: Serve) -> None:
    """FAULTS D6."""

    async def info(_request: Any, _context: Any) -> pb.GetEngineInfoResponse:
        return pb.GetEngineInfoResponse()

    target = f"grpc://{await serve(GetEngineInfo=info)}"
    async with AsyncClient(target) as client:
        await client.engine_info(timeout=LIMIT)
        assert client.target == target


def test_a_client_belongs_to_one_event_loop() -> None:
    """FAULTS D3."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        client = AsyncClient(f"127.0.0.1:{bound.getsockname()[1]}")

        async def call() -> None:
            await client.engine_info(timeout=LIMIT)

        async def health() -> None:
            await client.health(timeout=LIMIT)

        async def stream() -> None:
            await anext(client.stream([1]))

        async def multiplex() -> None:
            async with client.multiplex():
                pass

        with pytest.raises(tokenwire.UnreachableError):
            asyncio.run(call())
        for again in (call, health, stream, multiplex):
            with pytest.raises(
                tokenwire.ClientClosedError, match="has ended: create an AsyncClient in each event loop"
            ):
                asyncio.run(again())
        asyncio.run(client.close())
        with pytest.raises(tokenwire.ClientClosedError, match="is closed"):
            asyncio.run(call())
