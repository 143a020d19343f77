"""The prose linter finds what docs/style.toml bans, at its place, and only in prose."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from distributions import ROOT

pytest.importorskip("proselint", reason="`make setup` installs it")


@pytest.fixture(scope="module")
def linter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_prose", ROOT / ".ci" / "prose.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register(module.load_style())
    return module


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("Training resumes.\n", []),
        ("A run\nthat goes on.\n", ["x.md:2:6"]),
        ("A run that goes\non, and a data set.\n", ["x.md:1:12", "x.md:2:11"]),
        ("`goes on` and [a page](lab.md) and <!-- goes on -->\n", []),
        ("```text\nit goes on\n```\nIt goes on.\n", ["x.md:4:4"]),
        ("A word word.\n", ["x.md:1:3"]),
        ("## A word\n\nA word.\n", []),
        ('Is quoted: "models of transformers", and a key\'s name.\n', ["x.md:1:13"]),
    ],
)
def test_faults_and_their_places(linter: ModuleType, text: str, places: list[str]) -> None:
    found = linter.find_faults(text, "x.md", linter.load_style())
    assert [fault.split(": ")[0] for fault in found] == places


def test_docstrings_are_read_at_their_lines(linter: ModuleType) -> None:
    source = 'GOES = "goes on"\n\n\ndef f() -> None:\n    """Trains.\n\n    It goes on."""\n'
    found = linter.find_faults(linter.docstrings(source), "x.py", linter.load_style())
    assert [fault.split(": ")[0] for fault in found] == ["x.py:7:8"]


def test_messages_are_read_and_neither_docstrings_nor_names(linter: ModuleType) -> None:
    source = (
        '"""It goes on."""\n'
        'KEY = "alike"\n'
        'SCRIPT = "a\\nb\\nc\\nit goes on"\n'
        'raise ValueError(f"{KEY}: two "\n    f"machines {KEY} --anew")\n'
        'log.info("%s: training "\n    "goes on", KEY)\n'
    )
    found = linter.find_message_faults(source, "x.py", linter.load_style())
    assert found == [
        "x.py:4: 'two machines': hosts",
        "x.py:6: 'goes on': resumes, continues, keeps",
    ]


def test_every_text_of_the_project_is_read(linter: ModuleType) -> None:
    style = linter.load_style()
    style["files"]["skip"] = []
    texts = {path.relative_to(ROOT).as_posix() for path in linter.find_texts(style)}
    expected = {
        "README.md",
        "CONTRIBUTING.md",
        "docs/training.md",
        "plugins/zero/README.md",
        "ds_core/entries.py",
    }
    assert expected <= texts and any(name.startswith("changes/") for name in texts)


def test_the_command_names_a_fault_and_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A run goes on.\n")
    command = [sys.executable, ".ci/prose.py", page]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout.endswith("page.md:1:7: 'goes on': resumes, continues, keeps\n")
