"""The contenders, one module each, which is imported only in the process that runs it."""

import importlib
from typing import NamedTuple

from bench.cases import Case
from bench.contenders.base import Contender


class ContenderInfo(NamedTuple):
    """The properties of a contender."""

    label: str
    """Name in tables and plots."""
    server: str | None
    """Name of its server; None if the engine runs in the caller."""
    streams: bool = True
    """Whether it streams tokens."""
    unary: bool = False
    """Whether it takes part in unary cases."""

    def supports(self, case: Case) -> bool:
        """Return whether the contender takes part in a case; one without streams takes part in plain stream cases too."""
        return self.unary if case.unary else self.streams or case.logprobs is None


SMG = "smg"
IN_PROCESS = "in_process"
MULTIPLEX = "multiplex"
TYPED = "multiplex_typed"
STREAM = "generate_stream"
UNARY = "generate"
HTTP = "http"

CONTENDERS = {
    MULTIPLEX: ContenderInfo("tokenwire Multiplex, step view", "tokenwire"),
    TYPED: ContenderInfo("tokenwire Multiplex, typed streams", "tokenwire"),
    STREAM: ContenderInfo("tokenwire GenerateStream", "tokenwire"),
    UNARY: ContenderInfo("tokenwire Generate", "tokenwire", streams=False, unary=True),
    IN_PROCESS: ContenderInfo("in-process AsyncLLM.generate", None, unary=True),
    SMG: ContenderInfo("smg-grpc-servicer", "smg", unary=True),
    HTTP: ContenderInfo("vLLM HTTP /inference/v1/generate", "http", unary=True),
}
"""All contenders, by the name of their module."""


def load(name: str) -> Contender:
    """Import and create a contender."""
    contender: Contender = importlib.import_module(f"bench.contenders.{name}").make()
    return contender
