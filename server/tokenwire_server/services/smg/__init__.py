"""The service `vllm.grpc.engine.VllmEngine`, which smg's gateway calls, implemented on tokenwire's own requests.

Served in addition to EngineService with `tokenwire serve --smg`; requires the extra: `pip install 'tokenwire[smg]'`.
The other modules of this package import packages from the extra.
"""

import importlib

from tokenwire_server.services.host import Host
from tokenwire_server.transport.server import Service

_NEEDED = ("smg_grpc_proto.generated.vllm_engine_pb2_grpc", "tokenwire.text")


def missing() -> str | None:
    """Return why the service cannot be served in this environment; None if it can."""
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    except ImportError as error:
        return str(error)
    return None


def services(host: Host) -> list[Service]:
    """Return the service, if the options enable it."""
    if not host.config.smg:
        return []
    from tokenwire_server.services.smg.service import service  # noqa: PLC0415  # needs the extra

    return [service(host)]
