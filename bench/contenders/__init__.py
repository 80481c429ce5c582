"""The contenders: one module each, imported only in the process that runs it."""

import importlib
from typing import NamedTuple

from bench.cases import Case
from bench.contenders.base import Contender


class Entry(NamedTuple):
    """A contender, as the runner knows it."""

    label: str
    server: str | None
    """Which server it needs; None: it is its own."""
    streams: bool = True
    unary: bool = False

    def takes(self, case: Case) -> bool:
        """Whether it takes part in a case. A case of streams may be answered in whole by those that can only do that."""
        return self.unary if case.unary else self.streams or case.logprobs is None


SMG = "smg"
IN_PROCESS = "in_process"
MULTIPLEX = "multiplex"
TYPED = "multiplex_typed"
STREAM = "generate_stream"
UNARY = "generate"
HTTP = "http"

CONTENDERS = {
    MULTIPLEX: Entry("tokenwire Multiplex, step view", "tokenwire"),
    TYPED: Entry("tokenwire Multiplex, typed streams", "tokenwire"),
    STREAM: Entry("tokenwire GenerateStream", "tokenwire"),
    UNARY: Entry("tokenwire Generate", "tokenwire", streams=False, unary=True),
    IN_PROCESS: Entry("in-process AsyncLLM.generate", None, unary=True),
    SMG: Entry("smg-grpc-servicer", "smg", unary=True),
    HTTP: Entry("vLLM HTTP /inference/v1/generate", "http", unary=True),
}
"""By the names of their modules."""


def load(name: str) -> Contender:
    """Import a contender and make it."""
    contender: Contender = importlib.import_module(f"bench.contenders.{name}").make()
    return contender
