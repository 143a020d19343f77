"""Accelerators: the contract, the CPU, one implementation for every torch device, and selection (torch-free).

An accelerator is selected by `DS_ACCELERATOR`, else by probing plugins' first, then the core's, then cpu. The selection
is process-wide; ``ds_core.reset()`` and `reset_accelerator` clear it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core import names_on_first_use
from ds_core.accelerator.contract import Accelerator, HostEvent
from ds_core.entries import AcceleratorEntry, ask, resolve
from ds_core.errors import AcceleratorError, PluginError, did_you_mean
from ds_core.plugins import BACKENDS, BUILTIN, Found, Plugins, PluginState

if TYPE_CHECKING:
    from ds_core.accelerator.cpu import CpuAccelerator
    from ds_core.accelerator.generic import TorchAccelerator

__all__ = [
    "Accelerator",
    "CpuAccelerator",
    "HostEvent",
    "TorchAccelerator",
    "candidates",
    "get_accelerator",
    "reset_accelerator",
    "select_accelerator",
    "set_accelerator",
]

__getattr__, __dir__ = names_on_first_use(__name__, {"cpu": "CpuAccelerator", "generic": "TorchAccelerator"})

VARIABLE = "DS_ACCELERATOR"

log = logging.getLogger("ds_core.accelerator")


_choice: tuple[Accelerator, bool] | None = None  # and whether it comes from set_accelerator


def get_accelerator(plugins: Plugins | None = None) -> Accelerator:
    """This process's accelerator: from `set_accelerator`, else selected earlier, else selected now.

    plugins: select again from these (a run's plugins may bring devices), unless `set_accelerator` was called.
    """
    global _choice
    if _choice is None or (plugins is not None and not _choice[1]):
        _choice = select_accelerator(plugins or Plugins()), False
    return _choice[0]


def set_accelerator(accelerator: Accelerator) -> None:
    """Use `accelerator` in this process from now on, instead of `DS_ACCELERATOR` and probing."""
    global _choice
    if not isinstance(accelerator, Accelerator):
        raise AcceleratorError(
            f"{accelerator!r} is not an Accelerator; subclass ds_core.accelerator.Accelerator and pass an instance"
        )
    _choice = accelerator, True


def reset_accelerator() -> None:
    """Clear the selection; the next `get_accelerator` selects again."""
    global _choice
    _choice = None


@dataclass(frozen=True, slots=True)
class _Row:
    entry: AcceleratorEntry
    plugin: Found

    @property
    def outside(self) -> bool:
        return self.plugin.module != BUILTIN

    def __str__(self) -> str:
        return f"{self.entry.name} ({self.plugin.dist})"


def candidates(plugins: Plugins) -> list[tuple[AcceleratorEntry, str, str | None]]:
    """Every registered accelerator in order of preference: (entry, distribution, None or why it is unavailable)."""
    return [(row.entry, row.plugin.dist, ask(row.entry.probe)) for row in _rows(plugins)]


def select_accelerator(plugins: Plugins) -> Accelerator:
    """Select and load the accelerator; initializes no device.

    Raises AcceleratorError if `DS_ACCELERATOR` names none, a broken or an unavailable one (the message lists what is
    installed and why it is unavailable), if two plugins' are available with equal priority, or if loading fails.
    """
    named = os.environ.get(VARIABLE, "").strip()
    row = _named(named, plugins) if named else _probed(_rows(plugins))
    plugins.join(row.plugin)
    return _load(row)


def _rows(plugins: Plugins) -> list[_Row]:
    """In order of preference: plugins' first, then by priority and name; cpu is last."""
    rows = [_Row(entry, answer.plugin) for answer in plugins.offers("ds_accelerators") for entry in answer.value]
    return sorted(rows, key=lambda r: (not r.outside, -r.entry.priority, r.entry.name, r.plugin.dist))


def _broken(plugins: Plugins) -> list[tuple[Found, str]]:
    """The plugins that failed when they were loaded or asked, with the reason."""
    rows = [r for r in plugins.reports() if r.state is PluginState.QUARANTINED]
    return [(r.found, r.why) for r in rows if r.found.group == BACKENDS]


def _probed(rows: list[_Row]) -> _Row:
    usable = [row for row in rows if row.outside and ask(row.entry.probe) is None]
    if len(usable) > 1 and usable[0].entry.priority == usable[1].entry.priority:
        names = sorted({row.entry.name for row in usable[:2]})
        fix = f"set {VARIABLE} to {' or '.join(names)}" if len(names) > 1 else "uninstall one"
        raise AcceleratorError(
            f"{usable[0]} and {usable[1]} are both available with priority {usable[0].entry.priority}; {fix}"
        )
    # The core's are probed only if no plugin's is usable; cpu has no probe and ends the search.
    chosen = usable[0] if usable else next(r for r in rows if not r.outside and ask(r.entry.probe) is None)
    log.debug("accelerator %s, by probing", chosen)
    return chosen


def _named(named: str, plugins: Plugins) -> _Row:
    rows = _rows(plugins)
    for found, why in _broken(plugins):
        if _same(found.name, named):
            raise AcceleratorError(f"{VARIABLE}={named}: {why}; fix or uninstall {found.dist}")
    matching = [row for row in rows if _same(row.entry.name, named)] or _privateuse1(named, rows)
    outside = [row for row in matching if row.outside]
    if len(outside) > 1:
        raise AcceleratorError(
            f"{VARIABLE}={named} is offered by {outside[0].plugin.dist} and {outside[1].plugin.dist}; uninstall one, "
            f"or name it in plugins.disable"
        )
    if not matching:
        fix = did_you_mean(named, [row.entry.name for row in rows])
        raise AcceleratorError(f"{VARIABLE}={named} names no installed accelerator; {fix} {_inventory(rows, plugins)}")
    if (reason := ask(matching[0].entry.probe)) is not None:
        raise AcceleratorError(
            f"{VARIABLE}={named}: {matching[0]} is not available: {reason}. {_inventory(rows, plugins)}"
        )
    return matching[0]


def _same(name: str, named: str) -> bool:
    return name.lower() == named.lower()


def _privateuse1(named: str, rows: list[_Row]) -> list[_Row]:
    """The core's PrivateUse1 entry if `named` is the name under which the device is registered with torch."""
    import torch

    if not _same(torch._C._get_privateuse1_backend_name(), named):
        return []
    return [row for row in rows if not row.outside and row.entry.name == "privateuse1"]


def _inventory(rows: list[_Row], plugins: Plugins) -> str:
    """What is installed, each with why it is unavailable, then the plugins that failed."""
    lines = [f"{row}: {ask(row.entry.probe) or 'available'}" for row in rows]
    lines += [f"{found.name} ({found.dist}): broken, {why}" for found, why in _broken(plugins)]
    return f"Installed: {'; '.join(lines)}"


def _load(row: _Row) -> Accelerator:
    entry = row.entry
    try:
        made = resolve(entry.load)()
    except PluginError as error:
        raise AcceleratorError(f"accelerator {row}: {error}") from error
    except Exception as error:  # a plugin may raise anything
        raise AcceleratorError(f"accelerator {row}: {entry.load} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, Accelerator):
        raise AcceleratorError(f"accelerator {row}: {entry.load} gave a {type(made).__name__}, not an Accelerator")
    return made
