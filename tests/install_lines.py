"""The install lines of every text of this repository."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributions import DISTRIBUTIONS, ROOT, tracked

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXTS = {".md", ".py", ".jinja", ".yml", ".toml", ".txt", ".cff", ""}
PASSED_BY = ("tests/", "changes/", ".ci/", "Makefile", "benchmarks/RESULTS.md")
"""Tools and tests, which install by themselves, and what is told of the past."""
LINE = re.compile(r"\bpip install ((?:[^\n`#&|;)]|\\\n)+)")
PROJECTS: dict[str, dict[str, Any]] = {
    project["name"]: project
    for folder in (ROOT, *DISTRIBUTIONS)
    for project in [tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]]
}
"""Distribution -> its table ``project``."""


def base_name(word: str) -> str:
    """A requirement without its extras and bounds."""
    return re.split(r"[\[<>=~!; ]", word)[0]


@dataclass(frozen=True)
class Line:
    """An install line. place: its file and line."""

    place: str
    words: tuple[str, ...]

    @property
    def ours(self) -> list[str]:
        """What it names of this repository."""
        return [w for w in self.words if base_name(w) in PROJECTS]

    @property
    def constraints(self) -> str:
        """The file behind -c."""
        return self.words[self.words.index("-c") + 1] if "-c" in self.words[:-1] else ""


def lines_of(text: str, name: str) -> list[Line]:
    """The install lines of a text, comments and what follows the command left out."""
    found = []
    for match in LINE.finditer(text):
        shown = match[1].replace("\\\n", " ").split("\\n")[0]
        try:
            words = shlex.split(shown)
        except ValueError:  # a quotation mark of the sentence
            words = shlex.split(shown.replace('"', " ").replace("'", " "))
        found.append(Line(f"{name}:{text.count(chr(10), 0, match.start()) + 1}", tuple(words)))
    return found


def every_line() -> list[Line]:
    """Those of every file that git knows, tests and tools left out."""
    names = [n for n in tracked() if not n.startswith(PASSED_BY)]
    names = [n for n in names if "/tests/" not in n and Path(n).suffix in TEXTS]
    return [line for n in names for line in lines_of((ROOT / n).read_text("utf-8"), n)]
