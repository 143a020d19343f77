"""What a distribution says of itself where it is published: licence, links, Python versions, no
dead links.
"""

from __future__ import annotations

import email
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from building import build_wheels
from distributions import DISTRIBUTIONS, HOME, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = [folder / "pyproject.toml" for folder in (ROOT, *DISTRIBUTIONS)]
DOCUMENTATION = tomllib.loads(FILES[0].read_text())["project"]["urls"]["Documentation"]
PYTHONS = {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)}
COMMON = {
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
}
RELATIVE = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def relative_links(text: str) -> list[str]:
    """Links of a page, outside of its code, that lead nowhere from another site."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return RELATIVE.findall(prose)


def by_number(classifier: str) -> list[tuple[int, str]]:
    """3.9 comes before 3.10."""
    parts = re.split(r" :: |\.", classifier)
    return [(int(part) if part.isdigit() else 0, part) for part in parts]


def urls(folder: Path) -> dict[str, str]:
    """The links of a distribution: its folder in the repository, and pages that all share."""
    root = folder == ROOT
    place = HOME if root else f"{HOME}/tree/main/{folder.relative_to(ROOT).as_posix()}"
    return {
        "Homepage": place,
        "Documentation": DOCUMENTATION,
        "Source": place,
        "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
        "Issues": f"{HOME}/issues",
    }


def test_relative_links_are_seen() -> None:
    assert relative_links("[a](b.md) [c](https://d) [e](#f) `[g](h)`\n```\n[i](j)\n```") == ["b.md"]


@pytest.mark.parametrize("file", FILES, ids=[f.parent.name for f in FILES])
def test_every_distribution_says_what_pypi_shows(file: Path) -> None:
    project: dict[str, Any] = tomllib.loads(file.read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    assert (file.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert set(project["classifiers"]) >= PYTHONS | COMMON
    assert project["requires-python"] == ">=3.10"
    # The index shows Beta and Alpha side by side: all are Alpha until a GPU has been used.
    (status,) = [c for c in project["classifiers"] if c.startswith("Development Status")]
    assert status == "Development Status :: 3 - Alpha"
    assert project["classifiers"] == sorted(project["classifiers"], key=by_number)
    assert project["authors"] == project["maintainers"] == [{"name": "the ds_core developers"}]
    assert project["urls"] == urls(file.parent)
    text = (file.parent / project["readme"]).read_text()
    assert relative_links(text) == []
    for path in re.findall(rf"{re.escape(HOME)}/(?:blob|tree)/main/([^)#\s\"`]+)", text):
        assert (ROOT / path).exists(), path


def test_uv_finds_every_distribution_in_this_workspace() -> None:
    uv: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    names = [tomllib.loads(file.read_text())["project"]["name"] for file in FILES]
    assert uv["sources"] == {name: {"workspace": True} for name in names}
    found = {folder for glob in uv["workspace"]["members"] for folder in ROOT.glob(glob)}
    assert set(DISTRIBUTIONS) == {each for each in found if (each / "pyproject.toml").exists()}


@pytest.mark.slow
def test_wheels_carry_it(tmp_path: Path) -> None:
    for wheel in build_wheels([f.parent for f in FILES], tmp_path):
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            said = email.message_from_bytes(archive.read(metadata))
            assert metadata.replace("METADATA", "licenses/LICENSE") in archive.namelist(), (
                wheel.name
            )
        assert said["License-Expression"] == "Apache-2.0", wheel.name
        assert (
            len(said.get_all("Project-URL", [])) == 5
            and set(said.get_all("Classifier", [])) >= PYTHONS
        )
        assert relative_links(said.get_payload()) == [], wheel.name
