"""docs/tutorials/add-a-plugin.md does what it shows: its commands in order, from wheels, in an
empty environment.

``PYTHONPATH=tests python tests/wheels/test_newcomer.py`` runs it and writes the files and the output into the page.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
from distributions import DISTRIBUTIONS, ROOT
from ds_testing.processes import clean_environment, run
from pages import DOCS, blocks

sys.path.insert(0, str(ROOT / ".ci"))

import build as builder

PAGE = DOCS / "tutorials" / "add-a-plugin.md"
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
FILE = re.compile(r"<!-- file (\S+) -->\n.*?<!-- /file -->", re.DOTALL)
HAVE = re.compile(
    r"(?!__editable__|_editable|ds_|ds-|dscore_|pip|__pycache__|distutils|_distutils)(?!.*\.pth$)"
)
"""What of this environment's packages a new one is shown: torch and other foundations, and nothing
of ours.
"""


def show_foundations(folder: Path) -> None:
    """What pip would bring from an index, which tests do not reach."""
    here = Path(pytest.__file__).parents[1]
    found = folder / "found"
    found.mkdir()
    for path in filter(lambda p: HAVE.match(p.name), here.iterdir()):
        (found / path.name).symlink_to(path)
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    for path in (
        p
        for p in site.iterdir()
        if p.name.startswith(("setuptools", "pkg_resources", "distutils", "_distu"))
    ):
        path.rename(folder / f"old_{path.name}")  # an older one of venv's
    (site / "found.pth").write_text(f"{found}\n")


def played(folder: Path) -> str:
    """The page with the files and the output that its commands make in `folder`."""
    wheels = builder.build([ROOT, *DISTRIBUTIONS], folder / "dist", f"{builder.version()}+clone")
    builder.write_constraints(wheels, folder / "dist" / "constraints.txt")
    (folder / "wrong.json").write_text(next(b.text for b in blocks(PAGE) if "patients" in b.text))
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    env = clean_environment(HOME=str(folder), **settings)

    def play(found: re.Match[str]) -> str:
        lines = []
        for command in re.findall(r"^\$ (.+)$", found[1], re.MULTILINE):
            status = 1 if "wrong" in command else 0
            said = run(["bash", "-c", command], cwd=folder, env=env, status=status, timeout=300)
            lines += [f"$ {command}", *said.replace(str(folder), "...").rstrip("\n").splitlines()]
            if command.endswith("venv env"):
                show_foundations(folder)
        return "```console\n" + "\n".join(lines) + "\n```"

    def show(found: re.Match[str]) -> str:
        text = (folder / found[1]).read_text()
        language = {".py": "python", ".json": "json"}[Path(found[1]).suffix]
        note = (
            " no-check: the section is of the new plugin"
            if language == "json"
            else " no-run: it is installed above"
        )
        return f"<!-- file {found[1]} -->\n```{language}{note}\n{text}```\n<!-- /file -->"

    return FILE.sub(show, CONSOLE.sub(play, PAGE.read_text("utf-8")))


def masked(text: str) -> str:
    """`text` without numbers, which other processors round otherwise, and without the progress of
    pytest.
    """
    return re.sub(r"\d+(\.\d+)*", "#", re.sub(r"^\.+ +\[.*\]$", "", text, flags=re.MULTILINE))


@pytest.mark.slow
def test_the_tutorial_is_what_it_shows(tmp_path: Path) -> None:
    assert masked(played(tmp_path)) == masked(PAGE.read_text("utf-8")), (
        "run python tests/wheels/test_newcomer.py"
    )


def test_it_takes_five_commands_and_what_it_shows_is_what_is_written() -> None:
    from ds_new.naming import forms_of
    from ds_new.rendering import render

    text = PAGE.read_text("utf-8")
    files = render("observer", forms_of("my-stop"))
    first = CONSOLE.findall(text)[0]
    assert len(re.findall(r"^\$ ", first, re.MULTILINE)) <= 5 and "stopped after" in first
    for shown in FILE.finditer(text):
        assert files[shown[1].removeprefix("my-stop/")] in shown[0], (
            f"{shown[1]}: run python tests/wheels/test_newcomer.py"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        PAGE.write_text(played(Path(name)), "utf-8")
