"""Check that the client runs with the lowest and the highest versions of its dependencies in pyproject.toml.

Run by `make check`. Each resolution is installed into a new environment that contains only the client's dependencies;
warnings are errors. With uv's cache this takes seconds.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv" / "versions"

# Imports the client and all stubs, serializes and parses a message, and prints the versions.
PROBE = """
import importlib, pathlib, sys
from importlib.metadata import version

import tokenwire
from tokenwire import v1

for path in sorted(pathlib.Path(v1.__file__).parent.glob("*_pb2*.py")):
    importlib.import_module(f"tokenwire.v1.{path.stem}")
from tokenwire.v1.generation_pb2 import GenerationInput

sent = GenerationInput(request_id="check", prompt_token_ids=[0, 2**32 - 1], priority=-1)
received = GenerationInput.FromString(sent.SerializeToString())
assert received == sent and received.HasField("priority"), received
heavy = {"torch", "vllm", "numpy", "transformers", "typer"} & sys.modules.keys()
assert not heavy, f"import tokenwire loads {heavy}"
print(*(f"{name} {version(name)}" for name in ("grpcio", "protobuf", "googleapis-common-protos", "msgspec")), sep=", ")
"""


def check(name: str, resolution: str) -> bool:
    """Install the client's dependencies with one of uv's resolution strategies, run the probe and return whether it passed."""
    environment = ENVIRONMENTS / name
    python = environment / "bin" / "python"
    uv: list[str | Path] = [ROOT / ".venv" / "bin" / "uv", "--quiet"]
    commands: list[list[str | Path]] = [
        [*uv, "venv", "--clear", "--python", sys.executable, environment],
        [*uv, "pip", "install", "--python", python, "--resolution", resolution, "--requirements", "pyproject.toml"],
        [python, "-W", "error", "-c", PROBE],
    ]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "client")}
    for command in commands:
        result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.stderr.write(f"check-versions: {name}: failed\n{result.stdout}{result.stderr}")
            return False
    sys.stderr.write(f"check-versions: {name}: {result.stdout}")
    return True


def main() -> int:
    """Check both resolutions and return the exit code."""
    results = [check("lowest", "lowest-direct"), check("highest", "highest")]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
