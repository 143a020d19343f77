"""Sessions in the documentation are what a user sees who types them.

A block ``console no-run: by tests/docs/test_sessions.py`` has commands, each with what it prints on
stdout and stderr. They run in the order of the page, in a folder with the page's files: blocks
below ``<!-- file NAME -->``. ``...`` stands for anything; numbers may differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ds_testing.processes import clean_environment
from pages import DOCS, blocks

PAGES = ("performance.md", "troubleshooting.md")
NOTE = "no-run: by tests/docs/test_sessions.py"
FILE = re.compile(r"<!-- file (\S+) -->\n```[^\n]*\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d+(?:\\\.\d+)?(?:e\\?[-+]\d+)?")

pytestmark = pytest.mark.slow


def sessions(page: Path) -> list[tuple[str, str]]:
    """Each command of a page with the output that is shown."""
    found = []
    for block in blocks(page):
        if block.language == "console" and block.note == NOTE:
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                found.append((command, shown))
    return found


def pattern(shown: str) -> str:
    """Of an output."""
    lines = []
    for line in shown.strip().splitlines():
        text = ".*".join(re.escape(part) for part in line.split("..."))
        numbers = NUMBER.sub(r"\\d[\\d.e+-]*", text)
        lines.append("(?:.*\n)*?" if line == "..." else f"{numbers}\n")
    return "".join(lines)


@pytest.mark.parametrize("name", PAGES)
def test_a_session_prints_what_is_shown(name: str, tmp_path: Path) -> None:
    for file, text in FILE.findall((DOCS / name).read_text()):
        (tmp_path / file).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = sessions(DOCS / name)
    assert found
    for command, shown in found:
        done = subprocess.run(
            ["sh", "-c", f"{command} 2>&1"],
            cwd=tmp_path,
            env=clean_environment(DS_ACCELERATOR="cpu", PATH=path, COLUMNS="200"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert re.search(pattern(shown), done.stdout), (
            f"{name}: $ {command}\nprints\n{done.stdout}\nand not\n{shown}"
        )
