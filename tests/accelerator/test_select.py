"""Which accelerator is chosen, and what is said when none can be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import ds_core
from ds_core.accelerator import (
    CpuAccelerator,
    candidates,
    get_accelerator,
    reset_accelerator,
    select_accelerator,
    set_accelerator,
)
from ds_core.entries import AcceleratorEntry, ask
from ds_core.errors import AcceleratorError, PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import BACKENDS, Found
from ds_core.setup.builtin import ds_accelerators


class Vendor(CpuAccelerator):
    name = "vendor"


def make_vendor() -> Vendor:
    return Vendor()


def make_nonsense() -> int:
    return 3


def make_failure() -> Vendor:
    raise OSError("libvendor.so is missing")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    reset_accelerator()
    yield
    reset_accelerator()


def announcing(entries: list[AcceleratorEntry]) -> Callable[[], list[AcceleratorEntry]]:
    def ds_accelerators() -> list[AcceleratorEntry]:
        return entries

    return ds_accelerators


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugins]:
    """Plugins of which each announces accelerators: ``install(dist=hook or entries)``."""

    def make(**offers: Any) -> Plugins:
        found = []
        for dist, offer in offers.items():
            module = ModuleType(f"selecting_{dist}")
            vars(module)["ds_accelerators"] = offer if callable(offer) else announcing(offer)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            found.append(Found(dist, BACKENDS, module.__name__, f"{dist}-ds", "1.0"))
        return Plugins(found=found)

    return make


def entry(
    name: str, load: str = "make_vendor", why: str | None = None, priority: int = 0
) -> AcceleratorEntry:
    return AcceleratorEntry(name, "cpu", f"{__name__}:{load}", lambda: why, priority)


def refused(plugins: Plugins) -> str:
    with pytest.raises((AcceleratorError, PluginError)) as caught:
        select_accelerator(plugins)
    return str(caught.value)


# -- by probing ------------------------------------------------------------------------------------


def test_out_of_tree_comes_before_in_tree(
    install: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even before a device of the core's that is available, and with a lower priority than it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert isinstance(select_accelerator(install(vendor=[entry("vendor", priority=-5)])), Vendor)


def test_in_tree_goes_by_priority_and_cpu_is_last(
    install: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = install(vendor=[entry("vendor", why="unplugged")])
    for name in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, name), "device_count", lambda: 0)
    assert select_accelerator(plugins).name == "cpu"
    for name in ("mps", "xpu", "cuda"):
        monkeypatch.setattr(getattr(torch, name), "device_count", lambda: 1)
        assert select_accelerator(plugins).name == name
    names = [e.name for e, _, _ in candidates(plugins)]
    assert names == ["vendor", "cuda", "xpu", "mps", "privateuse1", "cpu"]


def test_the_higher_priority_of_two_plugins_wins(install: Callable[..., Plugins]) -> None:
    plugins = install(other=[entry("other", "make_nonsense")], vendor=[entry("vendor", priority=1)])
    assert isinstance(select_accelerator(plugins), Vendor)


def test_two_plugins_of_one_priority_are_an_error_that_names_both(
    install: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = install(
        other=[entry("other")], vendor=[entry("vendor")], third=[entry("third", why="unplugged")]
    )
    message = refused(plugins)
    assert "other (other-ds) and vendor (vendor-ds)" in message
    assert "set DS_ACCELERATOR to other or vendor" in message
    monkeypatch.setenv("DS_ACCELERATOR", "vendor")
    assert isinstance(select_accelerator(plugins), Vendor)


def test_a_probe_that_fails_is_a_reason(install: Callable[..., Plugins]) -> None:
    def probe() -> str | None:
        raise OSError("no driver")

    plugins = install(vendor=[AcceleratorEntry("vendor", "cpu", f"{__name__}:make_vendor", probe)])
    assert not isinstance(select_accelerator(plugins), Vendor)
    assert candidates(plugins)[0][2] == "OSError: no driver"


def broken_hook() -> Iterable[AcceleratorEntry]:
    yield entry("vendor")
    raise OSError("no driver")


@pytest.mark.parametrize(
    ("hook", "why"), [(broken_hook, "OSError: no driver"), ([7], "but element 0 is an int")]
)
def test_a_broken_plugin_takes_nothing_down_unless_it_is_named(
    install: Callable[..., Plugins],
    hook: Any,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugins = install(vendor=hook)
    assert not isinstance(select_accelerator(plugins), Vendor)
    assert why in caplog.text
    monkeypatch.setenv("DS_ACCELERATOR", "Vendor")
    message = refused(plugins)
    assert why in message
    assert "vendor-ds" in message


def test_a_plugin_that_cannot_be_imported_is_fatal_when_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not when it is not, though it bears the name of a device that the core has as well."""
    plugins = Plugins(found=[Found("cpu", BACKENDS, "nowhere_to_be_found", "hasty-ds", "1.0")])
    select_accelerator(plugins)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    message = refused(plugins)
    assert "nowhere_to_be_found" in message
    assert "hasty-ds" in message


# -- by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["vendor", "VENDOR", " Vendor "])
def test_the_name_is_read_without_case(
    install: Callable[..., Plugins], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", named)
    plugins = install(vendor=[entry("Vendor", priority=-1)], other=[entry("other", priority=9)])
    assert isinstance(select_accelerator(plugins), Vendor)


def test_an_unknown_name_lists_what_there_is_and_why_not(
    install: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "vendr")
    message = refused(install(vendor=[entry("vendor", why="unplugged")]))
    assert "DS_ACCELERATOR=vendr names no installed accelerator; did you mean 'vendor'?" in message
    assert "vendor (vendor-ds): unplugged" in message
    assert "cpu (dscore-train): available" in message
    for name in ("cuda", "xpu", "mps", "privateuse1"):
        assert f"{name} (dscore-train): " in message


def test_an_unavailable_one_that_is_named_is_an_error_and_never_another(
    install: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "vendor")
    message = refused(install(vendor=[entry("vendor", why="unplugged")]))
    assert "vendor (vendor-ds) is not available: unplugged" in message
    assert "cpu (dscore-train): available" in message


def test_a_plugin_may_replace_a_device_of_the_core(
    install: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert isinstance(select_accelerator(install(vendor=[entry("cpu")])), Vendor)
    both = refused(install(vendor=[entry("cpu")], other=[entry("cpu")]))
    assert "other-ds and vendor-ds" in both
    assert "plugins.disable" in both


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("make_nonsense", "gave a int, not an Accelerator"),
        ("make_failure", "OSError: libvendor.so is missing"),
        ("not_there", "cannot load"),
    ],
)
def test_one_that_cannot_be_made_is_an_error(
    install: Callable[..., Plugins], load: str, words: str
) -> None:
    from ds_cli.doctor.checks import _accelerator

    message = refused(plugins := install(vendor=[entry("vendor", load)]))
    levels = {finding.part: finding.level for finding in _accelerator(plugins)}
    assert levels["accelerator"] == levels["accelerator vendor (vendor-ds)"] == "fault"
    assert (
        "plugin 'vendor' (vendor-ds 1.0" in message
        and "failed to make the accelerator vendor" in message
    )
    assert "DS_ACCELERATOR=cpu" in message and "name vendor-ds in plugins.disable" in message
    assert words in message


# -- the process-wide choice -----------------------------------------------------------------------


def test_the_choice_is_kept_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    first = get_accelerator()
    assert isinstance(first, CpuAccelerator)
    assert ds_core.get_accelerator() is first
    ds_core.reset()
    assert get_accelerator() is not first


def test_a_runs_own_plugins_choose_again(install: Callable[..., Plugins]) -> None:
    assert not isinstance(get_accelerator(install()), Vendor)
    chosen = get_accelerator(install(vendor=[entry("vendor")]))
    assert isinstance(chosen, Vendor)
    assert get_accelerator() is chosen


def test_what_the_user_set_goes_before_everything(
    install: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "nonsense")
    mine = Vendor()
    ds_core.set_accelerator(mine)
    assert get_accelerator() is mine
    assert get_accelerator(install(other=[entry("other")])) is mine


def test_only_an_accelerator_can_be_set() -> None:
    with pytest.raises(AcceleratorError, match="pass an instance"):
        set_accelerator(Vendor)  # type: ignore[arg-type]
    with pytest.raises(AcceleratorError, match="'cuda' is not an Accelerator"):
        set_accelerator("cuda")  # type: ignore[arg-type]


# -- probes ----------------------------------------------------------------------------------------


def test_a_probe_counts_devices_and_initializes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched() -> None:
        raise AssertionError("the probe initialised a device")

    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    monkeypatch.setattr(torch.xpu, "_lazy_init", touched)
    probes = {item.name: item.probe for item in ds_accelerators()}
    for name in ("cuda", "xpu", "mps"):
        for count in (0, 1):
            monkeypatch.setattr(getattr(torch, name), "device_count", lambda count=count: count)
            said = ask(probes[name])
            assert (
                said is None
                if count
                else f"torch {torch.__version__} sees no {name} device" in str(said)
            )
    assert ask(probes["privateuse1"]) == "no package has registered a PrivateUse1 device with torch"


def test_nothing_is_imported_or_initialised_too_early() -> None:
    """The package and its declarations load no torch; choosing one initialises no device."""
    code = """
import sys
import ds_core.accelerator, ds_core.setup.builtin
list(ds_core.setup.builtin.ds_accelerators())
assert "torch" not in sys.modules
ds_core.get_accelerator()
import torch
assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_cores_entries_name_what_exists() -> None:
    from ds_core.entries import resolve

    for item in tuple(ds_accelerators()):
        assert callable(resolve(item.load))
