"""Every install line takes what is ours from a clone, and names what exists.

Nothing is published: anybody may register our names where packages are published. tests/wheels runs
the lines.
"""

from __future__ import annotations

import sys

from distributions import ROOT
from install_lines import PROJECTS, base_name, every_line, lines_of
from packaging.requirements import Requirement

from ds_core.naming import PREFIX

sys.path.insert(0, str(ROOT / ".ci"))

import build as builder

CONSTRAINTS = ("dist/constraints.txt", "$DS_CORE/dist/constraints.txt")
LINES = every_line()


def test_lines_are_seen() -> None:
    text = 'say `pip install dscore-zero`\n$ pip install -q -c dist/constraints.txt "dscore-train[all]"  # x'
    first, second = lines_of(text, "page")
    assert first.ours == ["dscore-zero"] and first.constraints == ""
    assert second.ours == ["dscore-train[all]"] and second.constraints == "dist/constraints.txt"
    assert second.place == "page:2"


def test_each_takes_ours_from_the_clone() -> None:
    assert [line for line in LINES if line.ours and line.constraints not in CONSTRAINTS] == []
    # A folder brings what it needs, too: a plugin that somebody writes needs dscore-train.
    folders = [w for line in LINES for w in line.words if w.startswith("./")]
    unbound = [
        line
        for line in LINES
        if any(w.startswith(("./", "my-")) for w in line.words)
        and line.constraints not in CONSTRAINTS
    ]
    assert folders and unbound == []


def test_each_names_what_exists() -> None:
    for line in LINES:
        for word in line.words:
            if word.startswith(PREFIX):
                assert base_name(word) in PROJECTS, line
        for word in line.ours:
            extras = PROJECTS[base_name(word)].get("optional-dependencies", {})
            assert Requirement(word).extras <= set(extras), line


def test_each_distribution_can_be_installed_by_its_own_line() -> None:
    """Its README has one."""
    said = {
        name for line in LINES if "README.md" in line.place for name in map(base_name, line.ours)
    }
    assert set(PROJECTS) - said == set()


def test_no_other_page_speaks_of_links_or_folders() -> None:
    """One idiom: neither --find-links nor a list of folders, which lacks what they need."""
    assert [line for line in LINES if line.ours and "--find-links" in line.words] == []
    parts = ("./plugins/", "./ops/", "./monitors/")
    assert [line for line in LINES if any(w.startswith(parts) for w in line.words)] == []


def test_the_constraints_name_every_wheel_by_a_version_that_no_index_has() -> None:
    number = builder.local_version(ROOT)
    assert "+g" in number and number.startswith(builder.version(ROOT))
    config = builder.config_of(ROOT, number)
    assert config["project"]["version"] == number
    assert config["project"]["dynamic"] == []
