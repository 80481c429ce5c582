"""What the modules of this package share: the model's name, the callback for progress and the error."""

from collections.abc import Callable
from typing import Final

NAME: Final = "SmolLM2-135M-Instruct"

Progress = Callable[[str], None]
"""Called with one line of text before each step that takes time."""


class DemoModelError(Exception):
    """The demo model cannot be downloaded, converted or cached. The message is one line."""
