"""The site is published version by version, on the branch gh-pages and at Read the Docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import ROOT

sys.path.insert(0, str(ROOT / ".ci"))

import publish_docs

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text("utf-8"))
CHECKS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
READ_THE_DOCS = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text("utf-8"))


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *publish_docs.WHO, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with one commit, and a site in it that git ignores."""
    git(tmp_path, "init", "-q", "--bare", "-b", "main", "remote")
    git(tmp_path, "clone", "-q", "remote", "clone")
    folder = tmp_path / "clone"
    (folder / "source.txt").write_text("1")
    (folder / ".gitignore").write_text("/site/\n*.inv\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "1")
    git(folder, "push", "-q", "origin", "HEAD:main")
    write_site(folder, "first")
    return folder


def write_site(folder: Path, text: str, *names: str) -> None:
    site = folder / "site"
    site.mkdir(exist_ok=True)
    for name in ("index.html", "objects.inv", *names):
        (site / name).write_text(text)


def published(clone: Path) -> dict[str, str]:
    """File -> text on the branch, at the remote."""
    remote = clone.parent / "remote"
    names = git(remote, "ls-tree", "-r", "--name-only", "gh-pages").split()
    return {name: git(remote, "show", f"gh-pages:{name}") for name in names}


def test_versions_stand_beside_each_other(clone: Path) -> None:
    write_site(clone, "first", "gone.html")
    for ref in ("main", "v0.9.0", "v0.10.0"):
        publish_docs.publish(clone / "site", ref, clone)
    (clone / "site/gone.html").unlink()
    write_site(clone, "second")
    publish_docs.publish(clone / "site", "main", clone)
    publish_docs.publish(clone / "site", "main", clone)  # nothing new: no commit
    files = published(clone)
    assert set(files) == {
        ".nojekyll",
        "index.html",
        *(f"{version}/index.html" for version in ("latest", "0.9.0", "0.10.0")),
        *(f"{version}/objects.inv" for version in ("latest", "0.9.0", "0.10.0")),
        *(f"{version}/gone.html" for version in ("0.9.0", "0.10.0")),
    }
    assert files["latest/index.html"] == "second" and files["0.9.0/index.html"] == "first"
    listed = re.findall(r'<li><a href="([\w.]+)/">', files["index.html"])
    assert listed == ["0.10.0", "0.9.0", "latest"]
    assert "url=0.10.0/" in files["index.html"]
    remote = clone.parent / "remote"
    assert len(git(remote, "log", "--format=%s", "gh-pages").splitlines()) == 4
    assert git(clone, "status", "--porcelain") == "" and "main" in git(clone, "branch")


def test_only_main_and_releases_are_published(clone: Path) -> None:
    with pytest.raises(SystemExit, match="tags such as"):
        publish_docs.publish(clone / "site", "feature/x", clone)
    with pytest.raises(SystemExit, match="make docs"):
        publish_docs.publish(clone / "nowhere", "main", clone)


def test_they_build_what_the_checks_build() -> None:
    job = WORKFLOW["jobs"]["publish"]
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps[0] == "make docs" and steps[1].startswith("python .ci/publish_docs.py site ")
    assert WORKFLOW["env"].items() <= CHECKS["env"].items()
    python = next(s for s in job["steps"] if "setup-python" in s.get("uses", ""))
    assert python in CHECKS["jobs"]["check"]["steps"]
    # yaml reads the key "on" as True
    assert WORKFLOW[True]["push"] == {"branches": ["main"], "tags": ["v*"]}
    (command,) = READ_THE_DOCS["build"]["commands"]
    assert command.endswith("make docs SITE=$READTHEDOCS_OUTPUT/html")
    assert command.startswith(f"PIP_EXTRA_INDEX_URL={CHECKS['env']['PIP_EXTRA_INDEX_URL']} ")
    assert READ_THE_DOCS["build"]["tools"]["python"] == python["with"]["python-version"]
