"""Check that the client runs on the lowest and on the highest versions that pyproject.toml declares for it.

Run by `make check`. Each set of versions gets a new environment with the client's own dependencies and nothing else;
warnings are errors there. uv's cache makes it a matter of seconds.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv" / "versions"

# Imports the client and all of the stubs, sends a message through bytes and back, and prints the versions.
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
    """Install the client's dependencies by one of uv's resolution strategies and run the probe on them."""
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
    """Check both ends of the range; fail if either fails."""
    results = [check("lowest", "lowest-direct"), check("highest", "highest")]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
