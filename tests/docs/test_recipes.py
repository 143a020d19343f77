"""The plugins in README.md and architecture.md can be installed and pass their kits.

Those in docs/plugins are what ``dscore new plugin`` writes; ``plugins/new/tests`` builds, installs
and tests every kind.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from building import write_metadata
from ds_testing.processes import clean_environment, run

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "architecture.md", ROOT / "README.md")
HEAD = re.compile(
    r"# (?P<file>[\w/]+\.py)(?:\s+group: (?P<group>[\w.]+)(?:\s+section: (?P<section>\w+))?)?$"
)

KITS = """
import torch

import ds_core
from ds_testing import PluginConformance

class TestGoal(PluginConformance):
    entry_point, section, good_config, bad_configs = "goal", "goal", {"loss": 0.5}, [{}, {"loss": "low"}]

class TestHello(PluginConformance):
    entry_point, section, good_config, bad_configs = "ds_hello.plugin", "hello", {"every": 3}, [{"every": 0}]

def test_they_serve_when_they_are_named(capsys):
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    config |= {"hello": {"every": 1}, "goal": {"loss": 1e9}}
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(3, 1), config=config)
    engine.backward(engine(torch.ones(4, 3)).square().mean())
    engine.step()
    engine.destroy()
    said = capsys.readouterr().out
    assert "hello from step" in said and "reached a loss of" in said
"""


def recipes() -> dict[str, dict[str, str]]:
    """Distribution -> its files by path, and under "entry point" its entry point."""
    found: dict[str, dict[str, str]] = {}
    for page in PAGES:
        for code in re.findall(r"```python\n(# .*?)```", page.read_text(), flags=re.DOTALL):
            head = HEAD.match(code.partition("\n")[0])
            if head is None:
                continue
            file = head["file"]
            package = file.partition("/")[0].removesuffix(".py")
            files = found.setdefault(package.replace("_", "-"), {})
            files[file] = code
            if head["group"]:
                name = head["section"] or package
                module = file.removesuffix(".py").replace("/", ".")
                files["entry point"] = f"{head['group']} {name} {module}"
    return found


RECIPES = recipes()


def test_every_recipe_is_found_and_is_whole() -> None:
    assert sorted(RECIPES) == ["ds-hello", "goal"]
    for dist, files in RECIPES.items():
        assert "entry point" in files, dist


@pytest.fixture
def as_installed(tmp_path: Path) -> Path:
    """All recipes in one folder, with the metadata that pip would write."""
    site = tmp_path / "site"
    for dist, files in RECIPES.items():
        for file, code in files.items():
            if file != "entry point":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).write_text(code)
                if "/" in file:
                    (site / file).with_name("__init__.py").touch()
        group, name, module = files["entry point"].split()
        write_metadata(
            site, dist, "Requires-Dist: dscore-train", entry_points={group: {name: module}}
        )
    return site


@pytest.mark.slow
def test_recipes_pass_their_kits(as_installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_kits.py").write_text(KITS)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_kits.py"]
    run(command, cwd=tmp_path, env=clean_environment(PYTHONPATH=str(as_installed)), timeout=300)
