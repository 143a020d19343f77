"""The kernel table: who serves, who is passed over and why, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import pytest

from ds_core.entries import KernelEntry
from ds_core.errors import KernelError
from ds_core.kernels import Kernels
from ds_core.plugins import Plugins, PluginSettings


def fast(*_: object) -> str:
    return "fast"


def provider(name: str, **entry: object) -> KernelEntry:
    values = {"op": "adam", "provider": name, "load": f"{__name__}:fast", "priority": 10, **entry}
    return KernelEntry(**values)  # type: ignore[arg-type]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterable[object]:
    """A function: entries -> the table with a plugin that offers them."""
    import sys

    def make(*entries: KernelEntry, forced: dict[str, str] | None = None) -> Kernels:
        module = ModuleType("kernel_plugin")
        module.ds_kernels = lambda: entries  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kernel_plugin", module)
        monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
        me = ModuleType("test_table_home")
        me.fast = fast  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "test_table_home", me)
        return Kernels(Plugins(PluginSettings(load=("kernel_plugin",))), forced)

    yield make
