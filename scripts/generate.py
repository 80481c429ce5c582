"""Generate the typed Python stubs from `protos/`, or check that the committed stubs are up to date.

Run by `make generate` and `make check` with the interpreter of `.venv-generate` (requirements/generate.lock): its protoc
generates code for protobuf 6.31.1 and grpcio 1.74, the lowest versions that the client supports. It is separate from the
engine's environment, which has the newest versions.
"""

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
# The proto package is also the Python import path, so generated imports need no rewriting.
PACKAGE = Path("tokenwire/v1")
COMMITTED = ROOT / "client" / PACKAGE
PACKAGE_INIT = '"""Generated stubs of the `tokenwire.v1` contract; `make generate` writes this package."""\n'


def generate(target: Path) -> None:
    """Write the stubs of all proto files into `target`, a package root."""
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).glob("*.proto"))
    if not sources:
        sys.exit(f"generate: no proto files in {PROTOS / PACKAGE}")
    # protoc looks up protoc-gen-mypy and protoc-gen-mypy_grpc in PATH.
    plugins = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{plugins}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}"),
        *(f"--python_out={target}", f"--grpc_python_out={target}", f"--mypy_out=quiet:{target}"),
        # The plugin's README documents `async_only`, which it silently ignores; `only_async` works.
        f"--mypy_grpc_out=quiet,only_async:{target}",
        *sources,
    ]
    result = subprocess.run(command, env=environment, check=False)
    if result.returncode:
        sys.exit(f"generate: protoc failed with exit code {result.returncode}")
    (target / PACKAGE / "__init__.py").write_text(PACKAGE_INIT)


def contents(package: Path) -> dict[str, str]:
    """Return the text of all Python files in a package folder, by name."""
    return {path.name: path.read_text() for path in sorted(package.glob("*.py*")) if path.suffix in {".py", ".pyi"}}


def differences(committed: dict[str, str], fresh: dict[str, str]) -> list[str]:
    """Return the lines of a unified diff from the committed to the generated stubs."""
    lines: list[str] = []
    for name in sorted(committed.keys() | fresh.keys()):
        before = committed.get(name, "").splitlines(keepends=True)
        after = fresh.get(name, "").splitlines(keepends=True)
        lines += difflib.unified_diff(before, after, f"committed/{name}", f"generated/{name}")
        # The diff is empty if an empty file is missing on one side.
        if (name in committed) != (name in fresh):
            lines.append(f"only in {'committed' if name in committed else 'generated'}: {name}\n")
    return lines


def main() -> int:
    """Generate the stubs and return the exit code; with --check write nothing and fail if the stubs differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs and write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = contents(Path(folder) / PACKAGE)
    committed = contents(COMMITTED) if COMMITTED.is_dir() else {}
    difference = differences(committed, fresh)
    if check:
        if difference:
            sys.stderr.writelines(difference)
            sys.stderr.write("generate: the committed stubs differ from protos/; run `make generate` and commit.\n")
            return 1
        sys.stderr.write("generate: the committed stubs are up to date\n")
        return 0
    COMMITTED.mkdir(parents=True, exist_ok=True)
    for name in committed.keys() - fresh.keys():
        (COMMITTED / name).unlink()
    for name, text in fresh.items():
        if committed.get(name) != text:
            (COMMITTED / name).write_text(text)
    sys.stderr.write(f"generate: {len(fresh)} files in {COMMITTED.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
