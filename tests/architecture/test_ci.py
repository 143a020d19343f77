"""The workflow runs every check of the Makefile, and the release check keeps how each ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributions import ROOT

sys.path.insert(0, str(ROOT / ".ci"))

import release_check

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
CHECKS = {"lint", "test", "wheels", "docs", *(t for t in TARGETS if t.startswith("test-"))}
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def run_by(job: dict[str, Any]) -> set[str]:
    """The targets of the Makefile that a job runs."""
    matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
    found = set()
    for step in job["steps"]:
        for word in re.findall(r"\bmake ([\w-]+|\$\{\{ matrix\.target \}\})", step.get("run", "")):
            found |= set(matrix) if "matrix" in word else {word}
    return found


def test_every_check_is_run_by_the_workflow() -> None:
    assert set().union(*map(run_by, WORKFLOW["jobs"].values())) == CHECKS


def test_a_change_waits_for_the_fast_ones_and_nights_have_the_rest() -> None:
    # yaml reads the key "on" as True
    assert {"push", "pull_request", "schedule"} <= set(WORKFLOW[True])
    each_change = [job for job in WORKFLOW["jobs"].values() if "if" not in job]
    assert {"lint", "test", "wheels", "test-frontends", "test-hosts"} <= set().union(
        *map(run_by, each_change)
    )


def test_the_release_check_has_them_all() -> None:
    listed = re.search(r"^RELEASE_CHECKS := (.*)$", MAKEFILE, re.MULTILINE)
    # test-all has the tests of test, and test-wheels builds the wheels
    assert listed is not None and set(listed[1].split()) == CHECKS - {"test", "wheels"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / ".gitignore").write_text("build\nbenchmarks/release-check.md\n")
    (tmp_path / "Makefile").write_text(
        "good:\n\t@echo '== 3 | passed =='\n\t@echo\nbad:\n\t@false\n"
    )
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init"], ["add", "."], ["commit", "-m", "1"]):
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_the_release_check_runs_all_and_keeps_the_last_lines(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["--root", str(repository), "--make", "make"]
    assert release_check.main(["good", *said]) == 0
    assert release_check.main(["bad", "good", *said]) == 1
    page = (repository / "benchmarks/release-check.md").read_text()
    assert "| `make bad` | **failed** (2) | 0.0 min | make" in page
    assert "| `make good` | green | 0.0 min | 3 \\| passed |" in page
    assert (repository / "build/release-check/good.log").read_text().startswith("== 3")
    (repository / "Makefile").write_text("good:\n\t@echo 4\n")
    assert release_check.main(["good", *said]) == 1
    assert "The working tree has changes" in capsys.readouterr().out


def test_an_interrupted_release_check_resumes_at_the_same_commit(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["--root", str(repository), "--make", "make"]
    assert release_check.main(["good", "bad", *said]) == 1
    # What was green is not run again; what failed is.
    assert release_check.main(["good", "bad", *said]) == 1
    shown = capsys.readouterr().out
    assert shown.count("good: was green at this commit") == 1
    assert "bad: was green" not in shown
    page = (repository / "benchmarks/release-check.md").read_text()
    assert "| `make good` | green |" in page and "| `make bad` | **failed** (2) |" in page
    # Another commit, or --again, runs all.
    assert release_check.main(["good", "--again", *said]) == 0
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    words = [*who, "commit", "--allow-empty", "-m", "2"]
    subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True)
    assert release_check.main(["good", *said]) == 0
    assert "was green" not in capsys.readouterr().out
