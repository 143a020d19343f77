"""What the documentation shows of a command's output is what the command prints.

A ``console`` block that begins with ``$ dscore ...`` holds a command and all that it prints. After a change of the
output, ``python tests/docs/test_generated.py`` writes the blocks anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```console\n\$ (dscore [^\n]+)\n(.*?)```", re.DOTALL)
PAGES = sorted(page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text()))


def printed(command: str) -> str:
    """What `command` prints, run in this process."""
    from ds_cli.app import make_app

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        make_app()(shlex.split(command)[1:])
    return said.getvalue()


def generated(text: str) -> str:
    """The page `text` with every block as the commands print it now."""
    return BLOCK.sub(lambda found: f"```console\n$ {found[1]}\n{printed(found[1])}```", text)


def test_there_are_generated_pages() -> None:
    assert "choosing-a-stage.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_shown_output_is_current(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == generated(text), f"docs/{page} is out of date: run python tests/docs/test_generated.py"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(generated((DOCS / name).read_text()))
