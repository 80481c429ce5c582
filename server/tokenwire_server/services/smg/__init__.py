"""`vllm.grpc.engine.VllmEngine`, the engine service that smg's gateway speaks, translated to our own requests.

Served beside our service with `tokenwire serve --smg`; needs the extra: `pip install 'tokenwire[smg]'`. The modules
beside this one import what the extra brings.
"""

import importlib

from tokenwire_server.services.host import Host
from tokenwire_server.transport.server import Service

_NEEDED = ("smg_grpc_proto.generated.vllm_engine_pb2_grpc", "tokenwire.text")


def missing() -> str | None:
    """Say why the service cannot be served here; None where it can."""
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
