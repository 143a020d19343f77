"""Which accelerator is chosen, and what the error says when none fits."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from ds_core.accelerator import get_accelerator, reset_accelerator, select_accelerator, set_accelerator
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.entries import AcceleratorEntry
from ds_core.errors import AcceleratorError
from ds_core.plugins import BACKENDS, Found, Plugins


class Fake(CpuAccelerator):
    name = "fake"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    reset_accelerator()
    yield
    reset_accelerator()


@pytest.fixture
def plugins(monkeypatch):
    def make(*entries, extra=()):
        found = list(extra)
        for i, entry in enumerate(entries):
            module = types.ModuleType(f"acc_mod_{i}")
            module.ds_accelerators = lambda e=entry: [e]
            monkeypatch.setitem(sys.modules, module.__name__, module)
            found.append(Found(f"acc{i}", BACKENDS, module.__name__, f"ds-acc{i}", "1"))
        return Plugins(found=found)

    return make


def entry(name, probe=None, priority=0, load="tests_accelerator_fake:Fake"):
    return AcceleratorEntry(name, "cpu", load, probe, priority)


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = types.ModuleType("tests_accelerator_fake")
    module.Fake, module.not_one = Fake, dict
    monkeypatch.setitem(sys.modules, "tests_accelerator_fake", module)


def test_without_devices_it_is_the_cpu(plugins):
    assert select_accelerator(plugins()).name == "cpu"


def test_out_of_tree_beats_in_tree_when_its_probe_agrees(plugins):
    assert select_accelerator(plugins(entry("fake"))).name == "fake"
    assert select_accelerator(plugins(entry("fake", probe=lambda: "no such card"))).name == "cpu"


def test_priority_then_name(plugins):
    chosen = select_accelerator(plugins(entry("low"), entry("high", priority=5)))
    assert type(chosen) is Fake
    with pytest.raises(
        AcceleratorError, match=r"one \(ds-acc0\) and two \(ds-acc1\) are both available.*DS_ACCELERATOR=one"
    ):
        select_accelerator(plugins(entry("one"), entry("two")))


def test_the_variable_names_any_registered_one(plugins, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "FAKE")
    assert select_accelerator(plugins(entry("other"), entry("fake"))).name == "fake"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert select_accelerator(plugins(entry("fake"))).name == "cpu"


def test_an_unknown_name_lists_what_is_installed_and_why_not(plugins, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuad")
    broken = Found("brk", BACKENDS, "no_such_module_acc", "ds-brk", "1")
    with pytest.raises(AcceleratorError) as caught:
        select_accelerator(plugins(entry("fake", probe=lambda: "card is on fire"), extra=[broken]))
    text = str(caught.value)
    for word in ("cuad", "did you mean 'cuda'", "card is on fire", "cpu (ds-core)", "no_such_module_acc"):
        assert word in text


def test_a_named_but_unavailable_one_says_why(plugins, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "fake")
    with pytest.raises(AcceleratorError, match="not available: card is on fire"):
        select_accelerator(plugins(entry("fake", probe=lambda: "card is on fire")))


def test_what_is_loaded_must_be_an_accelerator(plugins, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "fake")
    with pytest.raises(AcceleratorError, match="gave a dict"):
        select_accelerator(plugins(entry("fake", load="tests_accelerator_fake:not_one")))
    with pytest.raises(AcceleratorError, match="cannot load"):
        select_accelerator(plugins(entry("fake", load="tests_accelerator_fake:missing")))
    with pytest.raises(AcceleratorError, match="not an Accelerator"):
        set_accelerator(3)


def test_get_and_set_are_process_wide():
    assert get_accelerator() is get_accelerator()
    mine = Fake()
    set_accelerator(mine)
    assert get_accelerator() is mine
    reset_accelerator()
    assert get_accelerator() is not mine


def test_choosing_initialises_no_device():
    code = (
        "import torch\n"
        "from ds_core.accelerator import get_accelerator\n"
        "get_accelerator()\n"
        "assert not torch.cuda.is_initialized()\n"
        "import sys; sys.exit(0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
