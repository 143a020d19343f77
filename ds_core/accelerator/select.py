"""Which accelerator this process uses: named by `DS_ACCELERATOR`, else out-of-tree, in-tree, cpu, by probing."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ds_core.accelerator.contract import Accelerator
from ds_core.entries import AcceleratorEntry, ask, resolve
from ds_core.errors import AcceleratorError, PluginError, nearest
from ds_core.plugins import BUILTIN, PluginState

if TYPE_CHECKING:
    from ds_core.plugins import Answer, Plugins

__all__ = ["candidates", "get_accelerator", "reset_accelerator", "select_accelerator", "set_accelerator"]

VARIABLE = "DS_ACCELERATOR"

log = logging.getLogger("ds_core.accelerator")

_current: Accelerator | None = None


def get_accelerator() -> Accelerator:
    """This process's accelerator; chosen now when nobody has yet."""
    global _current
    if _current is None:
        from ds_core.plugins import Plugins

        _current = select_accelerator(Plugins())
    return _current


def set_accelerator(accelerator: Accelerator) -> None:
    """Use `accelerator` from now on."""
    global _current
    if not isinstance(accelerator, Accelerator):
        raise AcceleratorError(
            f"{type(accelerator).__name__} is not an Accelerator; subclass ds_core.accelerator.Accelerator"
        )
    _current = accelerator


def reset_accelerator() -> None:
    """Forget the choice (tests)."""
    global _current
    _current = None


def candidates(plugins: Plugins) -> list[tuple[AcceleratorEntry, str, str | None]]:
    """Every registered accelerator in the order of choice: (entry, distribution, None or why it is unavailable)."""
    return [(e, dist, ask(e.probe)) for e, dist, _ in _entries(plugins)]


def select_accelerator(plugins: Plugins) -> Accelerator:
    """Choose and load the accelerator; initialises no device.

    Raises AcceleratorError, listing what is installed and why each is unavailable, when `DS_ACCELERATOR` names
    none of them or when two out-of-tree ones claim the machine with equal priority.
    """
    named = os.environ.get(VARIABLE, "").strip()
    entries = _entries(plugins)
    if named:
        return _load_named(named, entries, plugins)
    usable = [(e, dist, core) for e, dist, core in entries if ask(e.probe) is None]
    outside = [(e, dist) for e, dist, core in usable if not core]
    if len(outside) > 1 and outside[0][0].priority == outside[1][0].priority:
        both = " and ".join(f"{e.name} ({dist})" for e, dist in outside[:2])
        raise AcceleratorError(f"{both} are both available; choose one with {VARIABLE}={outside[0][0].name}")
    entry, dist, _ = usable[0]
    log.debug("accelerator %s of %s", entry.name, dist)
    return _load(entry, dist)


def _entries(plugins: Plugins) -> list[tuple[AcceleratorEntry, str, bool]]:
    """(entry, distribution, is the core's), out-of-tree first, then by priority, then by name; cpu last."""
    plugins.load_backends()
    answers: list[Answer] = plugins.ask("ds_accelerators")
    rows = [(e, a.plugin.dist, a.plugin.module == BUILTIN) for a in answers for e in a.value]
    return sorted(rows, key=lambda r: (r[2], -r[0].priority, r[0].name))


def _load_named(named: str, entries: list[tuple[AcceleratorEntry, str, bool]], plugins: Plugins) -> Accelerator:
    for entry, dist, _ in entries:
        if entry.name.lower() == named.lower():
            if (reason := ask(entry.probe)) is not None:
                raise AcceleratorError(f"{VARIABLE}={named}: {entry.name} ({dist}) is not available: {reason}")
            return _load(entry, dist)
    rows = [f"{e.name} ({dist}{': ' + why if (why := ask(e.probe)) else ''})" for e, dist, _ in entries]
    broken = [r for r in plugins.reports() if r.state is PluginState.QUARANTINED]
    rows += [f"{r.found.name} ({r.why})" for r in broken]
    hint = nearest(named, [e.name for e, _, _ in entries])
    mend = f"; did you mean {hint!r}?" if hint else ""
    raise AcceleratorError(f"{VARIABLE}={named} names no installed accelerator{mend} Installed: {'; '.join(rows)}")


def _load(entry: AcceleratorEntry, dist: str) -> Accelerator:
    try:
        made = resolve(entry.load)()
    except PluginError as error:
        raise AcceleratorError(f"accelerator {entry.name} of {dist}: {error}") from error
    if not isinstance(made, Accelerator):
        raise AcceleratorError(
            f"accelerator {entry.name} of {dist}: {entry.load} gave a {type(made).__name__}, not an Accelerator"
        )
    return made
