"""All distributions have the names that ds_core.naming says, and every text spells them so."""

from __future__ import annotations

import re
from pathlib import Path

from distributions import DISTRIBUTIONS, HOME, ROOT, tracked

from ds_core.naming import CORE, dist_of

NAME = re.compile(r'^name = "(.+)"', re.MULTILINE)
FORMER = ("ds-core", "ds-zero", "ds-cli", "ds-checkpoint", "ds-optimizers", "ds-testing")


def project_name(folder: Path) -> str:
    found = NAME.search((folder / "pyproject.toml").read_text("utf-8"))
    assert found is not None
    return found[1]


def test_distributions_are_named_after_their_packages() -> None:
    assert project_name(ROOT) == CORE
    for folder in DISTRIBUTIONS:
        (package,) = (p.name for p in folder.glob("ds_*") if (p / "__init__.py").exists())
        assert project_name(folder) == dist_of(package), folder


def test_no_text_has_another_name_or_address() -> None:
    """What `.ci/rename.py` would not find would stay behind at the next renaming."""
    former = re.compile(rf"(?<![\w-])(?:{'|'.join(FORMER)})(?![\w-])")
    home = re.compile(r"https://github\.com/[\w-]+/ds_core(?=[/\"\s)#]|$)")
    found = []
    for name in tracked():
        path = ROOT / name
        if path == Path(__file__) or path.suffix not in {".py", ".md", ".toml", ".jinja"}:
            continue
        text = path.read_text("utf-8").replace(HOME, "")
        found += [f"{name}: {text[m.start() : m.end()]}" for m in former.finditer(text)]
        found += [f"{name}: {m[0]}" for m in home.finditer(text)]
    assert found == []
