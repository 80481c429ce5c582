"""The manifest of a cached model: the size and SHA-256 of each file, and the recipe that built them."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

MANIFEST: Final = "tokenwire-manifest.json"

RECIPE: Final = 1
"""Version of `download` and `conversion`; increase it with a change to them, so that cached models are rebuilt."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a folder."""
    files = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"recipe": RECIPE, "files": files}, indent=2) + "\n")


def find_mismatch(folder: Path) -> str | None:
    """Return how a folder differs from its manifest; None if it does not."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        recipe, expected = manifest["recipe"], dict(manifest["files"])
    except FileNotFoundError:
        return "the manifest is missing"
    except (ValueError, KeyError, TypeError, OSError):
        return "the manifest cannot be read"
    if recipe != RECIPE:
        return f"it was built with recipe {recipe}, this version uses recipe {RECIPE}"
    actual = {path.name for path in folder.iterdir()} - {MANIFEST}
    if missing := sorted(expected.keys() - actual):
        return f"{missing[0]} is missing"
    if unknown := sorted(actual - expected.keys()):
        return f"{unknown[0]} is not in the manifest"
    for name, entry in sorted(expected.items()):
        if _describe(folder / name) != entry:
            return f"{name} has changed"
    return None


def _describe(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}
