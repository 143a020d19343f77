"""docs/tutorials/train-my-script.md does what it shows: its files, its commands in order, and their
output.

``python tests/docs/test_tutorial.py`` runs it and writes the output into the page.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from ds_testing.processes import run
from pages import DOCS, blocks

PAGE = DOCS / "tutorials" / "train-my-script.md"
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)


def write_files(folder: Path) -> None:
    """The files that the page tells its reader to write."""
    for block in blocks(PAGE):
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "json":
            (folder / "ds_config.json").write_text(block.text)


def played(folder: Path) -> str:
    """The page with the output that its commands have in `folder`, one after the other."""

    def play(found: re.Match[str]) -> str:
        lines = []
        for command in re.findall(r"^\$ (.+)$", found[1], re.MULTILINE):
            program, *arguments = shlex.split(command)
            path = Path(sys.executable).with_name(program)
            said = run([str(path if path.exists() else program), *arguments], cwd=folder)
            lines += [f"$ {command}", *said.rstrip("\n").splitlines()]
        return "```console\n" + "\n".join(lines) + "\n```"

    write_files(folder)
    return CONSOLE.sub(play, PAGE.read_text("utf-8"))


def masked(text: str) -> str:
    """`text` without digits, which other processors round otherwise."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)


@pytest.mark.slow
def test_the_tutorial_is_what_it_shows(tmp_path: Path) -> None:
    assert masked(played(tmp_path)) == masked(PAGE.read_text("utf-8")), (
        "run python tests/docs/test_tutorial.py"
    )


def test_it_shows_that_the_loss_falls() -> None:
    plain, ours = (
        re.findall(r"epoch \d: loss ([\d.]+)", text)
        for text in CONSOLE.findall(PAGE.read_text())[0:3:2]
    )
    assert len(plain) == len(ours) == 3
    assert max(float(plain[-1]), float(ours[-1])) < 0.5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=DOCS.parent) as name:
        PAGE.write_text(played(Path(name)), "utf-8")
