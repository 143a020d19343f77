"""`PluginConformance` passes a good plugin, and finds each fault in a bad one."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ds_testing.kits.tools.plugin import PluginConformance

from ds_core.errors import PluginError


class TestGoodPlugin(PluginConformance):
    entry_point = "kit_good.plugin"
    section = "kit"
    good_config: ClassVar[Any] = {"degree": 2, "inner": {"ratio": 0.25}}
    bad_configs = (
        {},
        {"degree": 0},
        {"degree": 1, "inner": {"ratio": 2}},
        {"degree": 1, "inner": {"ration": 1}},
    )

    @pytest.fixture(autouse=True)
    def _path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).parent / "kit"))


class TestCorePlugin(PluginConformance):
    """The core's own drivers go through the same door as everybody's."""

    entry_point = "ds_core.setup.builtin"


HEAD = """
import os, sys
from pydantic import BaseModel, ConfigDict, Field, RootModel
from ds_core.entries import KernelEntry, LauncherEntry, OptimizerEntry, SchedulerEntry

class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
"""
MODEL = (
    "class Model(Strict):\n    a: int = Field(1, description='one')\ndef ds_config():\n    "
    "return "
    "Model\n"
)

FAULTS: list[tuple[str, str, str]] = [
    (
        "test_imports_nothing_heavy",
        "import torch\ndef ds_kernels(): return ()",
        "imports .*'torch'",
    ),
    ("test_import_changes_nothing", "print('hello')", "prints at import: 'hello"),
    (
        "test_import_changes_nothing",
        "os.environ['KIT_TEST'] = '1'",
        r"environment variables \['KIT_TEST'\]",
    ),
    ("test_import_changes_nothing", "os.chdir('/')", "changes the working directory"),
    (
        "test_import_changes_nothing",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(0.5,)).start()",
        "starts 1 threads",
    ),
    (
        "test_loads_by_name",
        "def ds_kernel(): return ()",
        "unknown hook 'ds_kernel'; did you mean 'ds_kernels'",
    ),
    ("test_loads_by_name", "1 / 0", "failed to import: ZeroDivisionError"),
    ("test_every_hook_is_known_and_fits", "def ds_kernel(): return ()", "ds_kernel is no hook"),
    (
        "test_every_hook_is_known_and_fits",
        "def ds_runner(cfg): return None",
        "takes 'cfg'; the hook offers",
    ),
    (
        "test_every_hook_is_known_and_fits",
        "def ds_runner(*ctx): return None",
        "not a plain argument",
    ),
    ("test_every_hook_is_known_and_fits", "x = 1", "implements no hook"),
    (
        "test_hooks_answer_twice_the_same",
        "ONCE = iter([KernelEntry('op', 'p', 'math:sin', 0)])\ndef ds_kernels(): return ONCE",
        "ds_kernels answered",
    ),
    (
        "test_names_do_not_collide",
        "def ds_optimizers(): return {'Abc': OptimizerEntry('math:sin'), 'aBC': "
        "OptimizerEntry('math:cos')}",
        "names must differ in more than case",
    ),
    (
        "test_references_resolve",
        "def ds_schedulers(): return {'s': SchedulerEntry('math:sine')}",
        "math:sine",
    ),
    (
        "test_references_resolve",
        "def ds_schedulers(): return {'s': SchedulerEntry('math')}",
        "a reference 'package.module:",
    ),
    (
        "test_references_resolve",
        "def ds_launchers(): return {'s': LauncherEntry('math:pi')}",
        "not callable",
    ),
    (
        "test_references_resolve",
        "def ds_kernels(): return [KernelEntry('o', 'p', 'no.such:x', 0, available=lambda: 'no')]",
        "no module for 'no.such:x'",
    ),
    (
        "test_references_resolve",
        "def ds_kernels(): return [KernelEntry('o', 'p', 'math:sin', 0, available=lambda: True)]",
        "probe answered True",
    ),
    (
        "test_entries_are_well_formed",
        "def ds_kernels(): return [KernelEntry('o', 'p', 'math:sin', 0, dtypes=('fp32',))]",
        "holds 'fp32'",
    ),
    (
        "test_entries_are_well_formed",
        "def ds_kernels(): return [KernelEntry('', 'p', 'math:sin', 0)]",
        "op is empty",
    ),
    (
        "test_entries_are_well_formed",
        "def ds_kernels(): return ['math:sin']",
        "an iterable of KernelEntry, but element 0 is a str",
    ),
    (
        "test_entries_are_well_formed",
        "def ds_optimizers(): return {'o': OptimizerEntry('math:sin', grain='row')}",
        "grain is 'row'",
    ),
    (
        "test_entries_are_well_formed",
        (
            "class Loose(BaseModel):\n    a: int = Field(1, description='one')\n"
            "def ds_optimizers(): return {'o': OptimizerEntry('math:sin', __name__ + ':Loose')}"
        ),
        "Loose has extra=None",
    ),
    ("test_section_and_model_belong_together", MODEL, "set `section`"),
    (
        "test_model_is_strict_and_described",
        "class Model(Strict):\n    a: int = 1\ndef ds_config(): return Model",
        "a has no description",
    ),
    (
        "test_model_is_strict_and_described",
        (
            "class In(BaseModel):\n    b: int = Field(1, description='b')\n"
            "class Model(Strict):\n    a: list[In | None] = Field([], description='a')\ndef "
            "ds_config(): return Model"
        ),
        "In has extra=None",
    ),
    (
        "test_model_is_strict_and_described",
        "class Model(Strict):\n    a: float = Field(float('inf'), description='a')\ndef "
        "ds_config(): return Model",
        "the default inf is not JSON",
    ),
    (
        "test_model_is_strict_and_described",
        "def ds_config(): return dict",
        "must return a pydantic model class",
    ),
]


@pytest.mark.parametrize(
    "method, body, message", FAULTS, ids=[f"{i}-{f[0][5:]}" for i, f in enumerate(FAULTS)]
)
def test_kit_finds_the_fault(
    method: str, body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = _kit(tmp_path, monkeypatch, body)
    with pytest.raises((AssertionError, PluginError), match=message):
        getattr(kit, method)()


def test_kit_finds_faults_of_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = MODEL + "class Loose(BaseModel):\n    a: int = Field(1, description='one')\n"
    kit = _kit(
        tmp_path, monkeypatch, body, section="kit", good_config={"a": "x"}, bad_configs=[{"a": 2}]
    )
    with pytest.raises(ValueError, match="validation error"):
        kit.test_good_config_validates()
    with pytest.raises(pytest.fail.Exception, match=r"accepts the bad config \{'a': 2\}"):
        kit.test_bad_configs_are_refused()
    body = body.replace("return Model", "return Loose")
    loose = _kit(tmp_path, monkeypatch, body, section="kit", good_config={"a": 1})
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        loose.test_unknown_key_is_refused()


def test_kit_finds_configs_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = _kit(tmp_path, monkeypatch, "def ds_kernels(): return ()", section="kit")
    with pytest.raises(AssertionError, match="no ds_config, but section is 'kit'"):
        kit.test_section_and_model_belong_together()


def test_kit_finds_another_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_testing.kits.tools import plugin

    from ds_core.plugins.discovery import Found

    (tmp_path / "kit_neighbour.py").write_text("")
    kit = _kit(tmp_path, monkeypatch, "import kit_neighbour")
    monkeypatch.setattr(
        plugin, "discover", lambda: (Found("n", "ds_core.plugins", "kit_neighbour", "n", "1"),)
    )
    with pytest.raises(AssertionError, match=r"imports the plugins \['kit_neighbour'\]"):
        kit.test_imports_no_other_plugin()


_serial = itertools.count()


def _kit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, **attributes: Any
) -> PluginConformance:
    name = f"kit_bad_{next(_serial)}"
    (folder / f"{name}.py").write_text(HEAD + body + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)  # what a faulty declaration changes is put back
    monkeypatch.setenv("KIT_TEST", "")
    monkeypatch.delenv("KIT_TEST")
    importlib.invalidate_caches()
    kit: PluginConformance = type(
        "Kit", (PluginConformance,), {"entry_point": name, **attributes}
    )()
    return kit
