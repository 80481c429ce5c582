"""A server in the test's own process, over vLLM's AsyncLLM whose engine process the test plays."""

import warnings

with warnings.catch_warnings():
    # torch warns while it is imported, and here warnings are errors.
    warnings.simplefilter("ignore")
    from fake_engine.core import FakeEngineCore, FakeRequest, make_config, make_llm

from fake_engine.failures import Failure, failure_of
from fake_engine.server import FakeEngineServer, collect, read, within

__all__ = [
    "Failure",
    "FakeEngineCore",
    "FakeEngineServer",
    "FakeRequest",
    "collect",
    "failure_of",
    "make_config",
    "make_llm",
    "read",
    "within",
]
