"""An HTTP application on a port of its own, in the test's event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette


@asynccontextmanager
async def serve_http(app: Starlette) -> AsyncIterator[str]:
    """Serve, and give the address as a URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await serving
