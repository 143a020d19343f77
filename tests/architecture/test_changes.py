"""Change fragments are well formed: their names are read by towncrier, their text stands in a
list.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from distributions import DISTRIBUTIONS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETTINGS = PROJECT["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in SETTINGS["type"]]
NAMES = {"repository", "dscore-train"} | {
    tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
    for folder in DISTRIBUTIONS
}
IGNORED = {"README.md", Path(SETTINGS["template"]).name}
FRAGMENT = re.compile(r"(?P<name>[\w-]+)\.(?P<kind>[a-z]+)(?:\.\d+)?\.md")


def faults(name: str, text: str) -> list[str]:
    """What is wrong with a fragment of this file name and text."""
    found = []
    parsed = FRAGMENT.fullmatch(name)
    if not parsed:
        return ["its name is not DISTRIBUTION.KIND.md or DISTRIBUTION.KIND.N.md"]
    if parsed["name"] not in NAMES:
        found.append(f"there is no distribution {parsed['name']}")
    if parsed["kind"] not in KINDS:
        found.append(f"{parsed['kind']} is none of {', '.join(KINDS)}")
    words = text.strip()
    if not words.endswith((".", "`", ")")):
        found.append("it does not end like a sentence")
    if "\n\n" in words or re.match(r"[-*#] ", words):
        found.append("it is not one paragraph of text")
    return found


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("dscore-zero.fix.md", "Something was wrong.\n", 0),
        ("repository.internal.2.md", "Two\nlines.", 0),
        ("dscore-zero.md", "Text.", 1),
        ("37.fix.md", "Text.", 1),
        ("ds-none.bugfix.md", "Text.", 2),
        ("dscore-zero.fix.md", "", 1),
        ("dscore-zero.fix.md", "- A bullet.", 1),
        ("dscore-zero.fix.md", "One.\n\nTwo.", 1),
    ],
)
def test_faults_are_seen(name: str, text: str, count: int) -> None:
    assert len(faults(name, text)) == count


def test_fragments_are_well_formed() -> None:
    files = [f for f in (ROOT / SETTINGS["directory"]).iterdir() if f.name not in IGNORED]
    assert {f.name: found for f in files if (found := faults(f.name, f.read_text()))} == {}


def test_the_readme_explains_every_kind() -> None:
    text = (ROOT / SETTINGS["directory"] / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == KINDS


def test_the_changelog_has_the_place_where_sections_go() -> None:
    text = (ROOT / SETTINGS["filename"]).read_text()
    assert text.startswith("# Changelog\n\n<!-- towncrier release notes start -->\n")
