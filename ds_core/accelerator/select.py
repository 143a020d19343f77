"""Which accelerator this process uses: `DS_ACCELERATOR`, else probing: out-of-tree, in-tree, cpu.

The choice is process-wide state, one of the few; ``ds_core.reset()`` and `reset_accelerator` forget it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.accelerator.contract import Accelerator
from ds_core.entries import AcceleratorEntry, ask, resolve
from ds_core.errors import AcceleratorError, PluginError, nearest
from ds_core.plugins import BACKENDS, BUILTIN, PluginState

if TYPE_CHECKING:
    from ds_core.plugins import Found, Plugins

__all__ = ["candidates", "get_accelerator", "reset_accelerator", "select_accelerator", "set_accelerator"]

VARIABLE = "DS_ACCELERATOR"

log = logging.getLogger("ds_core.accelerator")


@dataclass(frozen=True, slots=True)
class _Choice:
    accelerator: Accelerator
    by_user: bool


_choice: _Choice | None = None


def get_accelerator(plugins: Plugins | None = None) -> Accelerator:
    """This process's accelerator: what `set_accelerator` said, else what was chosen before, else chosen now.

    plugins: choose again, from these (a run's own plugins may bring devices); what `set_accelerator` said still goes.
    """
    global _choice
    if _choice is None or (plugins is not None and not _choice.by_user):
        if plugins is None:
            from ds_core.plugins import Plugins

            plugins = Plugins()
        _choice = _Choice(select_accelerator(plugins), by_user=False)
    return _choice.accelerator


def set_accelerator(accelerator: Accelerator) -> None:
    """Use `accelerator` in this process from now on, whatever `DS_ACCELERATOR` and probing say."""
    global _choice
    if not isinstance(accelerator, Accelerator):
        raise AcceleratorError(
            f"{accelerator!r} is not an Accelerator; subclass ds_core.accelerator.Accelerator and pass an instance"
        )
    _choice = _Choice(accelerator, by_user=True)


def reset_accelerator() -> None:
    """Forget the choice; the next `get_accelerator` chooses afresh."""
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


@dataclass(frozen=True, slots=True)
class _Registry:
    """What is registered, in the order of choice, and the plugins that could not be asked, with why."""

    rows: list[_Row]
    broken: list[tuple[Found, str]]


def candidates(plugins: Plugins) -> list[tuple[AcceleratorEntry, str, str | None]]:
    """Every registered accelerator in the order of choice: (entry, distribution, None or why it is unavailable)."""
    return [(row.entry, row.plugin.dist, ask(row.entry.probe)) for row in _registry(plugins).rows]


def select_accelerator(plugins: Plugins) -> Accelerator:
    """Choose and load the accelerator; initialises no device.

    Raises AcceleratorError when `DS_ACCELERATOR` names none, a broken or an unavailable one (listing what is installed
    and why each is unavailable), when two out-of-tree ones are available with equal priority, and when the chosen
    one cannot be loaded.
    """
    registry = _registry(plugins)
    named = os.environ.get(VARIABLE, "").strip()
    row = _named(named, registry) if named else _probed(registry.rows)
    plugins.join(row.plugin)
    return _load(row)


def _registry(plugins: Plugins) -> _Registry:
    """Out-of-tree first, then by priority, then by name; the core's cpu has its lowest priority.

    A plugin that fails to answer is quarantined like one that fails to import: nobody may have asked for it.
    """
    rows = [_Row(entry, answer.plugin) for answer in plugins.offers("ds_accelerators") for entry in answer.value]
    broken = [
        (report.found, report.why)
        for report in plugins.reports()
        if report.state is PluginState.QUARANTINED and report.found.group == BACKENDS
    ]
    rows.sort(key=lambda r: (not r.outside, -r.entry.priority, r.entry.name, r.plugin.dist))
    return _Registry(rows, broken)


def _probed(rows: list[_Row]) -> _Row:
    usable = [row for row in rows if row.outside and ask(row.entry.probe) is None]
    if len(usable) > 1 and usable[0].entry.priority == usable[1].entry.priority:
        names = sorted({row.entry.name for row in usable[:2]})
        mend = f"set {VARIABLE} to {' or '.join(names)}" if len(names) > 1 else "uninstall one"
        raise AcceleratorError(
            f"{usable[0]} and {usable[1]} are both available with priority {usable[0].entry.priority}; {mend}"
        )
    # The core's are asked only when no out-of-tree one will do; cpu has no probe and ends the search.
    chosen = usable[0] if usable else next(r for r in rows if not r.outside and ask(r.entry.probe) is None)
    log.debug("accelerator %s, by probing", chosen)
    return chosen


def _named(named: str, registry: _Registry) -> _Row:
    for found, why in registry.broken:
        if _same(found.name, named):
            raise AcceleratorError(f"{VARIABLE}={named}: {why}; mend or uninstall {found.dist}")
    rows = registry.rows
    matching = [row for row in rows if _same(row.entry.name, named)] or _privateuse1(named, rows)
    outside = [row for row in matching if row.outside]
    if len(outside) > 1:
        raise AcceleratorError(
            f"{VARIABLE}={named} is offered by {outside[0].plugin.dist} and {outside[1].plugin.dist}; uninstall one, "
            f"or name it in plugins.disable"
        )
    if not matching:
        hint = nearest(named, [row.entry.name for row in rows])
        mend = f"; did you mean {hint!r}?" if hint else "."
        raise AcceleratorError(f"{VARIABLE}={named} names no installed accelerator{mend} {_inventory(registry)}")
    if (reason := ask(matching[0].entry.probe)) is not None:
        raise AcceleratorError(f"{VARIABLE}={named}: {matching[0]} is not available: {reason}. {_inventory(registry)}")
    return matching[0]


def _same(name: str, named: str) -> bool:
    return name.lower() == named.lower()


def _privateuse1(named: str, rows: list[_Row]) -> list[_Row]:
    """The core's PrivateUse1 entry, when `named` is the name under which the device was registered with torch."""
    import torch

    if not _same(torch._C._get_privateuse1_backend_name(), named):
        return []
    return [row for row in rows if not row.outside and row.entry.name == "privateuse1"]


def _inventory(registry: _Registry) -> str:
    """What is installed, each with why it is unavailable, then the plugins that could not even be asked."""
    told = [f"{row}: {ask(row.entry.probe) or 'available'}" for row in registry.rows]
    told += [f"{found.name} ({found.dist}): broken, {why}" for found, why in registry.broken]
    return f"Installed: {'; '.join(told)}"


def _load(row: _Row) -> Accelerator:
    entry = row.entry
    try:
        made = resolve(entry.load)()
    except PluginError as error:
        raise AcceleratorError(f"accelerator {row}: {error}") from error
    except Exception as error:  # whatever a back end raises, the message names it
        raise AcceleratorError(f"accelerator {row}: {entry.load} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, Accelerator):
        raise AcceleratorError(f"accelerator {row}: {entry.load} gave a {type(made).__name__}, not an Accelerator")
    return made
