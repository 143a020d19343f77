"""`make release` in a small repository of three of our distributions; and what publishes a tag."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributions import ROOT

sys.path.insert(0, str(ROOT / ".ci"))

import release

WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
PARTS = (".", "plugins/plots", "ops/kernel_kit")
FILES = (".gitignore", "CHANGELOG.md", "CITATION.cff", "changes/template.md.jinja")


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *who, *words], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "repository"
    leave = shutil.ignore_patterns("__pycache__", "tests", "prebuilt")
    for part in PARTS:
        (root / part).mkdir(parents=True, exist_ok=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / part / name, root / part)
        for package in (ROOT / part).glob("ds_*"):
            shutil.copytree(package, root / part / package.name, ignore=leave)
    (root / "changes").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    (root / "changes" / "dscore-plots.fix.md").write_text("A line was missing.\n")
    git(root, "init", "-b", "main")
    for key, value in (("user.name", "a"), ("user.email", "a@b")):
        git(root, "config", key, value)
    git(root, "add", ".")
    git(root, "commit", "-m", "1")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # which the release sets, and this takes back
    monkeypatch.setattr(release, "check_files", lambda out: None)  # twine is no part of the set-up
    return root


def released(root: Path, *words: str) -> int:
    return release.main([*words, "--root", str(root), "--skip-tests", "--pure"])


def test_a_release_has_version_notes_commit_tag_and_files(repository: Path) -> None:
    assert released(repository, "0.3.0") == 0
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "-1", "--format=%s") == "Release 0.3.0"
    assert git(repository, "rev-parse", "v0.3.0^{commit}") == git(repository, "rev-parse", "HEAD")
    assert '__version__ = "0.3.0"' in (repository / "ds_core/__init__.py").read_text()
    notes = (repository / "dist/NOTES.md").read_text()
    assert notes.startswith("## 0.3.0 (") and "- dscore-plots: A line was missing." in notes
    assert notes in (repository / "CHANGELOG.md").read_text()
    assert not (repository / "changes/dscore-plots.fix.md").exists()
    dist = repository / "dist"
    names = {file.name for file in dist.iterdir()}
    assert {
        "SHA256SUMS",
        "dscore_plots-0.3.0.tar.gz",
        "dscore_plots-0.3.0-py3-none-any.whl",
    } <= names
    assert len(names) == 2 * len(PARTS) + 2
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    with zipfile.ZipFile(dist / "dscore_plots-0.3.0-py3-none-any.whl") as archive:
        said = archive.read("dscore_plots-0.3.0.dist-info/METADATA").decode()
    assert "\npip install dscore-plots\n" in said and "constraints.txt" not in said


def test_a_dry_run_leaves_the_tree_as_it_is(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = git(repository, "rev-parse", "HEAD"), (repository / "CHANGELOG.md").read_text()
    assert released(repository, "0.3.0", "--dry-run") == 0
    assert git(repository, "status", "--porcelain") == git(repository, "tag") == ""
    after = git(repository, "rev-parse", "HEAD"), (repository / "CHANGELOG.md").read_text()
    assert after == before and not (repository / "dist").exists()
    clone = repository / "build/release/clone"
    assert git(clone, "tag") == "v0.3.0"
    assert len(list((repository / "build/release/dist").iterdir())) == 2 * len(PARTS) + 2
    assert "A dry run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "before", "why"),
    [
        ("next", "", "Invalid version: 'next'"),
        ("0.0.9", "", "0.0.9 is older than"),
        ("0.4.0", "tag v0.4.0", "0.4.0 is not newer than 0.4.0"),
        ("0.3.9", "tag v0.4.0", "0.3.9 is not newer than 0.4.0"),
        ("0.3.0", "rm changes/dscore-plots.fix.md", "the working tree has changes"),
    ],
)
def test_what_does_not_fit_is_refused(
    repository: Path,
    number: str,
    before: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if before:
        git(repository, *before.split())
    head = git(repository, "rev-parse", "HEAD")
    assert released(repository, number) == 1
    assert why in capsys.readouterr().err
    assert git(repository, "rev-parse", "HEAD") == head and not (repository / "dist").exists()


def test_without_notes_there_is_no_release(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(repository, "rm", "-q", "changes/dscore-plots.fix.md")
    git(repository, "commit", "-m", "2")
    assert released(repository, "0.3.0", "--dry-run") == 1
    assert "nothing to release" in capsys.readouterr().err


def test_the_files_alone_are_those_of_a_tag(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert released(repository, "0.3.0") == 0
    first = (repository / "dist/SHA256SUMS").read_text()
    assert released(repository, "0.3.0", "--build") == 0
    assert (repository / "dist/SHA256SUMS").read_text() == first
    assert released(repository, "0.3.1", "--build") == 1
    assert "this commit has version 0.3.0, not 0.3.1" in capsys.readouterr().err


def test_packages_that_are_built_speak_of_no_clone() -> None:
    """Every place that says how to install from one is changed for who has none."""
    texts = [*ROOT.glob("*/*/README.md"), ROOT / "README.md", *ROOT.glob("ds_core/**/*.py")]
    texts += [*ROOT.glob("*/*/ds_*/**/*.py"), *ROOT.glob("*/*/ds_*/**/*.jinja")]
    left = [f for f in texts if "dist/constraints.txt" in release.as_published(f.read_text())]
    assert left == []
    line = "pip install -c \"$DS_CORE/dist/constraints.txt\" -e 'my-lion[test]'\n"
    assert release.as_published(line) == "pip install -e 'my-lion[test]'\n"


def test_the_workflow_publishes_tags_only_after_approval() -> None:
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # yaml reads the key "on" as True
    publish = WORKFLOW["jobs"]["publish"]
    assert publish["environment"] == "release" and set(publish["needs"]) == {"build", "binary"}
    assert publish["permissions"]["id-token"] == "write"
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_the_workflow_calls_what_there_is() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    targets = set(re.findall(r"\bmake ([\w-]+)", "\n".join(re.findall(r"run: (.*)", text))))
    assert targets == {"release"}
    options = set(re.findall(r"(?<=\s)--(?:build|pure|binary)\b", text))
    said = subprocess.run(
        [sys.executable, ROOT / ".ci/release.py", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert options == {"--build", "--pure", "--binary"} and all(o in said for o in options)


@pytest.mark.parametrize("form", ["bug.yml", "feature.yml", "config.yml"])
def test_issue_forms_are_well_formed(form: str) -> None:
    said = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / form).read_text())
    if form == "config.yml":
        assert all({"name", "url", "about"} <= set(link) for link in said["contact_links"])
        return
    assert {"name", "description", "body"} <= set(said)
    ids = [part["id"] for part in said["body"]]
    assert len(ids) == len(set(ids))
