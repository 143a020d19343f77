"""What the documentation shows of a command's output is what the command prints.

A ``console`` block that begins with ``$ dscore ...`` holds a command and all that it prints. The table of layers in
architecture.md has import-linter's layers and each module's first line. ``python tests/docs/test_generated.py`` writes
both anew.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAYERS = re.compile(r"<!-- layers -->\n.*?<!-- /layers -->", re.DOTALL)
BLOCK = re.compile(r"```console\n\$ (dscore [^\n]+)\n(.*?)```", re.DOTALL)
PAGES = sorted(page.name for page in DOCS.glob("*.md") if BLOCK.search(t := page.read_text()) or LAYERS.search(t))


def printed(command: str) -> str:
    """What `command` prints, run in this process."""
    from ds_cli.app import make_app

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        make_app()(shlex.split(command)[1:])
    return said.getvalue()


def summary(module: str) -> str:
    """The first sentence of a module's docstring."""
    file = ROOT / "ds_core" / f"{module}.py"
    tree = ast.parse((file if file.exists() else ROOT / "ds_core" / module / "__init__.py").read_text())
    text = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(".;").replace("|", "\\|")


def layers() -> str:
    """The table of the core's layers."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    rows = ["| layer | modules |", "| --- | --- |"]
    for number, layer in enumerate(contract["layers"], 1):
        names = re.split(r"\s*[|:]\s*", layer)
        rows.append(f"| {number} | " + "<br>".join(f"`{name}`: {summary(name)}" for name in names) + " |")
    return "\n".join(["<!-- layers -->", *rows, "<!-- /layers -->"])


def generated(text: str) -> str:
    """The page `text` with every generated part as it is now."""
    text = LAYERS.sub(lambda _: layers(), text)
    return BLOCK.sub(lambda found: f"```console\n$ {found[1]}\n{printed(found[1])}```", text)


def test_there_are_generated_pages() -> None:
    assert {"architecture.md", "choosing-a-stage.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_shown_output_is_current(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == generated(text), f"docs/{page} is out of date: run python tests/docs/test_generated.py"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(generated((DOCS / name).read_text()))
