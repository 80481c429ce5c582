"""Pages of the documentation whose commands are run as they are typed."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from harness.processes import Finished, run
from harness.server import COMMAND

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:50051"
"""The address in the commands of all pages."""

_LEFT_OUT = "..."

GRPCURL_PAGE = ROOT / "docs" / "grpcurl.md"
GRPCURL_ON_A_SPECIAL_SERVER = (
    "While it loads, drains or has lost its engine",
    "TLS and a token",
    "A client certificate (mTLS)",
    "A UNIX socket",
)
"""Headings of the page whose commands tests/server runs; tests/languages runs all others on a simulated device."""

_HEADING_OR_FENCE = re.compile(
    r"^#+ (?P<heading>[^\n]*)$|^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """Commands of a page, and what it says that they print."""

    heading: str
    """The nearest heading before the block."""
    code: str
    output: str
    """The `text` block right after the commands; a line "..." stands for any lines. Empty where there is none."""


def bash_blocks(page: Path) -> list[Block]:
    """Return the blocks of commands of a page, in order."""
    blocks: list[Block] = []
    heading = ""
    end = 0
    text = page.read_text()
    for match in _HEADING_OR_FENCE.finditer(text):
        if match["heading"] is not None:
            heading = match["heading"]
        elif match["language"] == "bash":
            blocks.append(Block(heading, match["code"], ""))
        elif match["language"] == "text" and not text[end : match.start()].strip():
            blocks[-1] = blocks[-1]._replace(output=match["code"])
        end = match.end()
    return blocks


def type_in(code: str, folder: Path, replace: Mapping[str, str], *, timeout: float = 60.0) -> Finished:
    """Run commands in a folder; only the texts in `replace` are the test's. The tools are those of the environment."""
    for text, value in replace.items():
        assert text in code, f"the commands do not hold {text}"
        code = code.replace(text, value)
    start = f"PATH={shlex.quote(str(COMMAND.parent))}:$PATH; cd {shlex.quote(str(folder))}\n"
    return run(["bash", "-c", start + code], timeout=timeout)


def check_block(block: Block, folder: Path, replace: Mapping[str, str]) -> None:
    """Run a block's commands and check that they print what the page shows, errors included, and nothing else."""
    assert block.output, "the page does not say what these commands print"
    finished = type_in(f"exec 2>&1\n{block.code}", folder, replace)
    printed = [line.rstrip() for line in finished.stdout.splitlines()]
    position, skip = 0, False
    for line in block.output.splitlines():
        if line == _LEFT_OUT:
            skip = True
            continue
        found = next((i for i, one in enumerate(printed[position:], position) if one == line), None)
        assert found is not None, f"not printed, or not in this order: {line!r}\n{finished.stdout}"
        assert skip or found == position, f"more is printed before {line!r}\n{finished.stdout}"
        position, skip = found + 1, False
    assert skip or position == len(printed), f"more is printed at the end\n{finished.stdout}"
