"""`changed.py` on a small repository: which tests a change calls for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import changed
from changed import CORE_TESTS, Chosen, Repository, choose

FILES = {
    "ds_core/__init__.py": "",
    "ds_core/engine.py": "import torch",
    "plugins/kit/ds_kit/__init__.py": "",
    "plugins/kit/ds_kit/__init__.pyi": "from ds_kit.parts import part as part",
    "plugins/kit/ds_kit/parts.py": "from ds_core.engine import x",
    "plugins/kit/tests/test_kit.py": "import ds_kit",
    "plugins/a/ds_a/__init__.py": "from ds_kit import part",
    "plugins/a/ds_a/far.py": "",
    "plugins/a/tests/models.py": "",
    "plugins/a/tests/through.py": "from models import tiny",
    "plugins/a/tests/test_one.py": (
        "from models import tiny\nclass TestA(kits.OptimizerConformance): ...\nclass TestB: ..."
    ),
    "plugins/a/tests/test_two.py": "def test():\n    from ds_kit import part",
    "plugins/a/tests/test_three.py": "import through",
    "plugins/b/ds_b/__init__.py": "",
    "plugins/b/tests/test_b.py": "from ds_a.far import x",
    "tests/core/test_engine.py": "import ds_core",
    "docs/page.md": "# Page",
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [f.parent for f in tmp_path.rglob("__init__.py")]
    return Repository(tmp_path, found)


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        # the core: its own tests, and the conformance tests of what stands on it
        ("ds_core/engine.py", [*CORE_TESTS, "plugins/a/tests/test_one.py::TestA"]),
        (
            "ds_core/comm/start.py",
            [*CORE_TESTS, "tests/comm", "plugins/a/tests/test_one.py::TestA"],
        ),
        # a kit: its own, the conformance tests of what imports it, and who imports what changed
        (
            "plugins/kit/ds_kit/parts.py",
            ["plugins/kit/tests", "plugins/a/tests/test_one.py::TestA", "plugins/a/tests/test_two.py"],
        ),
        # a plugin, which no package imports: its own, and a test elsewhere that imports what changed
        ("plugins/a/ds_a/far.py", ["plugins/a/tests", "plugins/b/tests/test_b.py"]),
        ("plugins/b/ds_b/__init__.py", ["plugins/b/tests"]),
        ("plugins/a/tests/test_two.py", ["plugins/a/tests/test_two.py"]),
        # a helper: who uses it, also through another helper
        ("plugins/a/tests/models.py", ["plugins/a/tests/test_one.py", "plugins/a/tests/test_three.py"]),
        ("plugins/a/tests/conftest.py", []),
        ("docs/page.md", ["tests/docs"]),
        ("plugins/a/README.md", ["tests/docs"]),
        ("LICENSE", []),
    ],
)  # fmt: skip
def test_what_a_change_chooses(repository: Repository, path: str, tests: list[str]) -> None:
    chosen = choose([path], repository)
    assert chosen.arguments() == sorted(["tests/architecture", *tests])


def test_what_lies_in_another_is_not_given_twice() -> None:
    chosen = Chosen()
    chosen.add(["a/tests/test_x.py::TestA", "a/tests/test_y.py", "b/test_z.py::TestB"], "1")
    chosen.add(["a/tests", "b/test_z.py", "b/test_z.py::TestB"], "2")
    assert chosen.arguments() == ["a/tests", "b/test_z.py"]
    assert chosen.why["b/test_z.py::TestB"] == "1"


def test_changed_files_are_those_of_commits_and_of_the_working_tree(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("kept", "committed", "edited"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "1")
    (tmp_path / "committed").write_text("2")
    git("commit", "-am", "2")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").write_text("2")
    base = changed.default_base(tmp_path)
    assert changed.changed_files(base, tmp_path) == ["committed", "edited", "new"]


def test_every_chosen_folder_of_this_repository_exists() -> None:
    assert [folder for folder in CORE_TESTS if not (changed.ROOT / folder).is_dir()] == []
