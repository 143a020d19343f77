"""Names of earlier layouts, and the number of the contract."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ds_core
from ds_core.errors import PluginError
from ds_core.moved import MODULES, NAMES, now
from ds_core.plugins import Plugins
from ds_core.plugins.registry import PluginSettings


@pytest.mark.parametrize("old", sorted(MODULES))
def test_a_module_that_has_moved_gives_what_the_new_one_has(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is {MODULES[old]} now"):
        module = importlib.import_module(old)
    new = importlib.import_module(MODULES[old])
    names = [n for n in vars(new) if not n.startswith("_")]
    assert names and all(getattr(module, n) is getattr(new, n) for n in names)
    assert not Path(f"{old.replace('.', '/')}.py").exists()


@pytest.mark.filterwarnings("ignore:.* now:DeprecationWarning")
@pytest.mark.parametrize(
    ("old", "name"), [(old, name) for old, names in NAMES.items() for name in names]
)
def test_a_name_that_has_moved_is_the_new_one(old: str, name: str) -> None:
    home, _, new = NAMES[old][name].partition(":")
    module = importlib.import_module(old)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{old}.{name} is {home}.{new} now")):
        found = getattr(module, name)
    there = getattr(importlib.import_module(home), new.removesuffix("()"))
    assert found == (there() if new.endswith("()") else there)


def test_what_lies_below_follows() -> None:
    assert now("ds_core.cli.hosts.hostfile") == "ds_command_kit.hosts.hostfile"
    assert now("ds_core.checkpoint.opening") == "ds_run_state.opening"
    assert now("ds_core.engine") is None and now("torch.nn") is None


def test_what_never_was_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'ds_core.nothing'"):
        importlib.import_module("ds_core.nothing")
    with pytest.raises(
        AttributeError, match="module 'ds_core.partition' has no attribute 'nothing'"
    ):
        _ = ds_core.partition.nothing  # type: ignore[attr-defined]


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ds_access'] = None; import ds_core.access"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (
        "ds_core.access is ds_access.states now, of dscore-access, which is not installed"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (
            ds_core.contract + 1,
            rf"needs contract {ds_core.contract + 1}, and dscore-train .* keeps 1 to 2: upgrade dscore-train",
        ),
        (
            0,
            r"needs contract 0, and dscore-train .* keeps 1 to 2: upgrade it, or install an "
            r"older dscore-train",
        ),
        ("2", r"has DS_CONTRACT = '2'; it is a whole number"),
    ],
)
def test_a_contract_that_is_not_kept(
    needs: object, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"needs_{abs(hash(str(needs)))}"
    (tmp_path / f"{name}.py").write_text(
        f"DS_CONTRACT = {needs!r}\ndef ds_optimizers(): return {{}}\n"
    )
    with pytest.raises(PluginError, match=why):
        Plugins(PluginSettings(load=[name])).named("ds_optimizers", "optimizer")


def test_a_contract_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for needs in range(ds_core.oldest_contract, ds_core.contract + 1):
        (tmp_path / f"keeps_{needs}.py").write_text(
            f"DS_CONTRACT = {needs}\ndef ds_optimizers(): return {{}}\n"
        )
        Plugins(PluginSettings(load=[f"keeps_{needs}"])).named("ds_optimizers", "optimizer")


def test_a_table_of_modules_and_their_names_still_hands_names_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hands_on"
    package.mkdir()
    table = '__getattr__, __dir__ = names_on_first_use(__name__, {"one": "FIRST SECOND"})'
    (package / "__init__.py").write_text(f"from ds_core import names_on_first_use\n{table}\n")
    (package / "one.py").write_text("FIRST = 1\nSECOND = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = importlib.import_module("hands_on")
    assert (found.FIRST, found.SECOND) == (1, 2)
    assert found.__getattr__("__all__") == ["FIRST", "SECOND"]
