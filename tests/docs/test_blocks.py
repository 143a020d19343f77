"""Every code block of every page is run or checked, in the order of the page.

Python blocks run in an empty folder and share their names, after what `page_setups` gives; a block
whose first line is ``# path.py`` becomes that file. Lines of shell blocks that begin with `dscore`
run in the same process. JSON and YAML blocks are checked as configs, TOML blocks are parsed. What
can't be run here says so in its info string, with a reason: ``python no-run: needs a GPU``, ``json
no-check: a manifest``; blocks marked ``slow`` run in the slow tests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_setups import SETUPS, SLOW, WORLDS
from pages import ROOT, Block, blocks, name_of, pages
from played import PAGES as PLAYED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ELSEWHERE = {
    "README.md": "tests/docs/test_readme.py",
    **{name_of(page): "tests/played.py" for page in PLAYED},
    "docs/architecture.md": "tests/docs/test_recipes.py",
    "docs/tutorials/write-an-accelerator.md": "examples/third_party_accelerator/tests",
}
"""Pages whose Python is run by a test of their own."""

RECIPES = "docs/plugins/"
"""Their Python is of templates, which plugins/new/tests tests; their commands are run."""

LANGUAGES = {"python", "sh", "console", "json", "yaml", "toml", "text", "cpp", "diff"}
COMMANDS = ("dscore", "python", "pip", "make", "deepspeed", "torchrun", "accelerate", "export")
PAGES = [page for page in pages() if blocks(page)]
RUN = [
    page
    for page in PAGES
    if name_of(page) not in ELSEWHERE
    and any(b.language in ("python", "sh") and not b.left_out for b in blocks(page))
]


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, in words; comments are left out."""
    text = block.text.replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        where = f"{name_of(page)}:{block.line}"
        assert block.language in LANGUAGES | {""}, (
            f"{where}: {block.language!r} is none of {', '.join(sorted(LANGUAGES))}"
        )
        if block.language in ("", "text"):
            assert not block.text.startswith(COMMANDS), (
                f"{where}: a block of commands has the language sh"
            )
        if block.note:
            assert re.fullmatch(r"slow|no-(run|check): .{8,}", block.note), (
                f"{where}: {block.note!r}"
            )


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(b.language in ("json", "yaml", "toml") for b in blocks(p))],
    ids=name_of,
)
def test_configs_are_right(page: Path) -> None:
    from ds_config_formats.parsers import parse_yaml

    from ds_core.setup.compose import compose

    for block in blocks(page):
        if block.left_out:
            continue
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language in ("json", "yaml"):
            text = block.text if block.text.lstrip().startswith("{") else "{" + block.text + "}"
            config = json.loads(text) if block.language == "json" else parse_yaml(block.text)
            compose(dict(config), fill_later=True)


def run_blocks(name: str, folder: str, slow: bool) -> None:
    """Run the blocks of the page `name` in `folder`, in this process. slow: those marked so,
    too."""
    import ds_core

    before = Path.cwd()
    modules = set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        names: dict[str, Any] = {"__name__": "page", "__file__": f"{folder}/page.py"}
        exec(compile(SETUPS.get(name, ""), f"page_setups.SETUPS[{name!r}]", "exec"), names)  # noqa: S102
        for block in blocks(ROOT / name):
            if block.left_out or (block.note == "slow" and not slow):
                continue
            if block.language == "python" and not name.startswith(RECIPES):
                if block.file:
                    Path(block.file).parent.mkdir(parents=True, exist_ok=True)
                    Path(block.file).write_text(block.text)
                lines = "\n" * block.line + block.text  # a traceback names the page's own lines
                exec(compile(lines, ROOT / name, "exec", dont_inherit=True), names)  # noqa: S102
            elif block.language == "sh":
                for words in commands(block):
                    run_command(words, f"{name}:{block.line}")
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        for module in set(sys.modules) - modules:
            if str(getattr(sys.modules[module], "__file__", None) or "").startswith(folder):
                del sys.modules[module]
        ds_core.reset()


def run_command(words: list[str], where: str) -> None:
    """Run a command of a shell block; `pip install` is another test's."""
    if words[0] == "dscore" and words[1] != "run":
        from ds_command_kit.app import make_app

        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                make_app()(words[1:])
                status = 0
            except SystemExit as end:
                status = end.code or 0  # type: ignore[assignment]
        assert status == 0, f"{where}: {shlex.join(words)} ended with {status}: {said.getvalue()}"
    elif words[0] == "cp":
        subprocess.run(words, check=True)
    else:
        assert words[0] == "pip", (
            f"{where}: mark the block slow, or no-run with a reason: {shlex.join(words)}"
        )


@pytest.mark.parametrize("page", [page for page in RUN if name_of(page) not in SLOW], ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path, ranks: Any) -> None:
    ranks(WORLDS.get(name_of(page), 1), run_blocks, name_of(page), str(tmp_path), False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [p for p in RUN if name_of(p) in SLOW or any(b.note == "slow" for b in blocks(p))],
    ids=name_of,
)
def test_slow_blocks_run(page: Path, tmp_path: Path, ranks: Any) -> None:
    ranks(WORLDS.get(name_of(page), 1), run_blocks, name_of(page), str(tmp_path), True)


def test_pages_that_are_tested_elsewhere_are() -> None:
    for page, test in ELSEWHERE.items():
        files = sorted((ROOT / test).glob("*.py")) if (ROOT / test).is_dir() else [ROOT / test]
        assert any(Path(page).name in file.read_text() for file in files), (
            f"{test} does not read {page}"
        )


def test_setups_belong_to_pages() -> None:
    names = {name_of(page) for page in PAGES}
    assert set(SETUPS) | set(WORLDS) | set(ELSEWHERE) <= names
