"""Finding, loading and asking plugins (torch-free).

Entry-point *names* are read first and nothing is imported. A section's plugin is imported when the config
names the section; backends (things chosen by name or hardware) when a choice is to be made. Names are sorted,
because file order differs between hosts and every rank must call hooks in one order.

[Note: three tiers of failure] A broken plugin that nobody named is quarantined and shown by ``dscore doctor``.
A broken plugin that the config names is fatal. At run time an observer or monitor that fails is switched off
after one warning; anything on the data path is always fatal, since a silent fallback makes ranks diverge.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, cast

import importlib_metadata
import pluggy

from ds_core import hookspecs
from ds_core.errors import PluginError, nearest

__all__ = ["BACKENDS", "SECTIONS", "Answer", "Found", "PluginState", "Plugins", "Report", "discover", "reset_discovery"]

SECTIONS = "ds_core.plugins"
BACKENDS = "ds_core.backends"
AUTOLOAD_OFF = "DS_PLUGINS_DISABLE_AUTOLOAD"
BUILTIN = "ds_core.builtin"
LOADED = "plugins.load"  # stands for the distribution of modules that the config loads by hand

log = logging.getLogger("ds_core.plugins")


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """An entry point, not yet imported. `name` is the config section in group SECTIONS."""

    name: str
    group: str
    module: str
    dist: str
    version: str

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dist} {self.version}, module {self.module})"


class PluginState(Enum):
    """Where a plugin stands in this process."""

    AVAILABLE = "available"
    LOADED = "loaded"
    DISABLED = "disabled"
    QUARANTINED = "quarantined"
    SWITCHED_OFF = "switched off"


@dataclass(slots=True)
class Report:
    """One row of ``dscore plugins``."""

    found: Found
    state: PluginState
    why: str = ""
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one plugin answered to one hook."""

    plugin: Found
    value: Any


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The ``plugins`` section, already validated."""

    require: Sequence[str] = ()
    disable: Sequence[str] = ()
    load: Sequence[str] = ()
    prefer: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def discover() -> tuple[Found, ...]:
    """Every entry point of both groups, sorted; reads metadata only and imports nothing."""
    found = set()
    for group in (SECTIONS, BACKENDS):
        for point in importlib_metadata.entry_points(group=group):
            dist = point.dist
            name, version = (dist.name, dist.version) if dist is not None else ("unknown", "0")
            found.add(Found(point.name, group, point.module, name, version))
    return tuple(sorted(found))


def reset_discovery() -> None:
    """Forget what was discovered (after installing a distribution, and in tests)."""
    discover.cache_clear()
    importlib.invalidate_caches()
    importlib_metadata.MetadataPathFinder.invalidate_caches()


class _Manager(pluggy.PluginManager):
    """pluggy, with every function whose name starts with ``ds_`` taken as a hook."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if not name.startswith("ds_") or not inspect.isroutine(getattr(plugin, name, None)):
            return None
        return super().parse_hookimpl_opts(plugin, name) or pluggy.HookimplOpts(
            wrapper=False, hookwrapper=False, optionalhook=False, tryfirst=False, trylast=False, specname=None
        )


class Plugins:
    """The plugins of one run: what is installed, what is loaded, and the one way to ask them.

    found: entry points to use instead of the installed ones (tests).
    """

    def __init__(self, settings: PluginSettings | None = None, found: Iterable[Found] | None = None) -> None:
        self.settings = settings or PluginSettings()
        self._manager = _Manager("ds_core")
        self._manager.add_hookspecs(hookspecs)
        self._specs = {n for n in vars(hookspecs) if n.startswith("ds_")}
        self._reports: dict[Found, Report] = {}
        self._by_module: dict[str, Found] = {}
        self._backends_loaded = False
        installed = discover() if found is None else tuple(sorted(found))
        autoload = found is not None or not os.environ.get(AUTOLOAD_OFF)
        for item in installed:
            off = "" if autoload else f"{AUTOLOAD_OFF} is set"
            if item.name in self.settings.disable or item.dist in self.settings.disable:
                off = "plugins.disable names it"
            self._reports[item] = Report(item, PluginState.DISABLED if off else PluginState.AVAILABLE, off)
        self._check_required()
        core = Found("core", BACKENDS, BUILTIN, "ds-core", _core_version())
        self._reports[core] = Report(core, PluginState.AVAILABLE)
        self._load(core)
        self._load_named_modules()

    # -- loading ---------------------------------------------------------------------------------------------

    def section(self, name: str) -> Found | None:
        """The plugin that owns config section `name`, or None when no enabled plugin claims it.

        Raises PluginError when two distributions claim it and ``plugins.prefer`` does not choose.
        """
        return self._choose(name, [r.found for r in self._usable(SECTIONS) if r.found.name == name])

    def sections(self) -> dict[str, Found]:
        """Every section name that an installed and enabled plugin claims; of several owners the first."""
        owners: dict[str, Found] = {}
        for report in self._usable(SECTIONS):
            owners.setdefault(report.found.name, report.found)
        return owners

    def disabled(self, name: str) -> Report | None:
        """The report of an installed but disabled owner of section `name`, for error messages."""
        rows = (r for r in self._reports.values() if r.found.name == name and r.found.group == SECTIONS)
        return next((r for r in rows if r.state is PluginState.DISABLED), None)

    def load_sections(self, names: Iterable[str]) -> dict[str, Found]:
        """Import the owners of `names`; names that nobody claims are left out of the answer.

        Raises PluginError when a named plugin is broken: the config asked for it.
        """
        chosen = {name: owner for name in names if (owner := self.section(name)) is not None}
        for name in sorted(chosen, reverse=True):  # pluggy calls last-in first
            self._load(chosen[name])
        return chosen

    def load_backends(self) -> None:
        """Import every backend, once. A broken one is quarantined: nobody has asked for it by name yet."""
        if self._backends_loaded:
            return
        self._backends_loaded = True
        for report in reversed(self._usable(BACKENDS)):
            try:
                self._load(report.found)
            except PluginError as error:
                report.state, report.why = PluginState.QUARANTINED, str(error)
                log.info("plugin quarantined: %s", error)

    def probe_all(self) -> list[Report]:
        """Import everything installed, quarantining what breaks; for ``dscore plugins`` and ``doctor``."""
        for report in reversed(self._usable(SECTIONS)):
            try:
                self._load(report.found)
            except PluginError as error:
                report.state, report.why = PluginState.QUARANTINED, str(error)
        self.load_backends()
        return self.reports()

    def reports(self) -> list[Report]:
        """Every known plugin in name order."""
        return [self._reports[f] for f in sorted(self._reports)]

    def _usable(self, group: str) -> list[Report]:
        off = (PluginState.DISABLED, PluginState.QUARANTINED)
        return [r for f, r in sorted(self._reports.items()) if f.group == group and r.state not in off]

    def _choose(self, name: str, owners: list[Found]) -> Found | None:
        if len({o.dist for o in owners}) <= 1:
            return owners[0] if owners else None
        wanted = self.settings.prefer.get(name)
        for owner in owners:
            if owner.dist == wanted:
                return owner
        both = " and ".join(f"{o.dist} {o.version}" for o in owners)
        raise PluginError(
            f"section {name!r} is claimed by {both}; choose one with "
            f'"plugins": {{"prefer": {{"{name}": "{owners[0].dist}"}}}} or uninstall the other'
        )

    def _load_named_modules(self) -> None:
        for item in reversed(self.settings.load):  # pluggy calls last-in first
            name, _, module = item.rpartition("=")
            group = SECTIONS if name else BACKENDS
            found = Found((name or module).strip(), group, module.strip(), LOADED, "0")
            self._reports[found] = Report(found, PluginState.AVAILABLE)
            self._load(found)

    def _load(self, found: Found) -> None:
        report = self._reports[found]
        if report.state is PluginState.LOADED:
            return
        if found.module in self._by_module:  # one module may stand in both groups
            report.state = PluginState.LOADED
            return
        try:
            module = importlib.import_module(found.module)
        except Exception as error:  # whatever a plugin raises at import, the message names it
            raise PluginError(f"plugin {found} failed to import: {type(error).__name__}: {error}") from error
        report.hooks = self._register(found, module)
        report.state = PluginState.LOADED
        self._by_module[found.module] = found

    def _register(self, found: Found, module: ModuleType) -> tuple[str, ...]:
        names = tuple(n for n in vars(module) if n.startswith("ds_") and inspect.isroutine(getattr(module, n)))
        for name in names:
            if name not in self._specs:
                hint = nearest(name, self._specs)
                mend = f"; did you mean {hint!r}?" if hint else f"; known hooks: {', '.join(sorted(self._specs))}"
                raise PluginError(f"plugin {found} defines unknown hook {name!r}{mend}")
            opts = self._manager.parse_hookimpl_opts(module, name)
            if opts["wrapper"] or opts["hookwrapper"]:
                raise PluginError(f"plugin {found}: {name} is a wrapper; ds_core hooks are called one by one")
        try:
            self._manager.register(module, name=found.module)
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.is_registered(module):
                self._manager.unregister(module)
            raise PluginError(f"plugin {found} does not fit the hooks: {' '.join(str(error).split())}") from error
        return names

    def _check_required(self) -> None:
        if not self.settings.require:
            return
        from packaging.requirements import InvalidRequirement, Requirement

        for text in self.settings.require:
            try:
                need = Requirement(text)
            except InvalidRequirement as error:
                raise PluginError(
                    f"plugins.require: {text!r} is not a requirement like 'ds-zero>=0.1': {error}"
                ) from error
            try:
                have = importlib_metadata.version(need.name)
            except importlib_metadata.PackageNotFoundError:
                raise PluginError(f"plugins.require: {need.name} is not installed; pip install {text!r}") from None
            if not need.specifier.contains(have, prereleases=True):
                raise PluginError(
                    f"plugins.require: {text!r}, but {need.name} {have} is installed; pip install {text!r}"
                )

    # -- asking ----------------------------------------------------------------------------------------------

    def ask(self, hook: str, **arguments: Any) -> list[Answer]:
        """Call every implementation of `hook` in plugin order; None answers are left out. Errors are fatal."""
        answers = []
        for impl in self._impls(hook):
            found = self._by_module[impl.plugin_name]
            try:
                value = impl.function(*[arguments[a] for a in impl.argnames])
            except Exception as error:
                raise PluginError(f"plugin {found} failed in {hook}: {type(error).__name__}: {error}") from error
            if value is not None:
                answers.append(Answer(found, value))
        return answers

    def ask_one(self, hook: str, plugin: Found, **arguments: Any) -> Any:
        """Call `hook` of one loaded plugin; None when the plugin does not implement it."""
        module = self._by_module.get(plugin.module)
        for impl in self._impls(hook) if module else ():
            if impl.plugin_name == plugin.module:
                return impl.function(*[arguments[a] for a in impl.argnames])
        return None

    def driver(self, hook: str, **arguments: Any) -> Answer | None:
        """The one answer to a driver hook, or None. Two answers are an error that names both."""
        answers = self.ask(hook, **arguments)
        if len(answers) > 1:
            both = " and ".join(str(a.plugin) for a in answers)
            raise PluginError(f"{hook} is answered by {both}; only one can drive: disable one with plugins.disable")
        return answers[0] if answers else None

    def named(self, hook: str, kind: str) -> dict[str, Answer]:
        """Merge the name -> entry mappings of a by-name driver hook; keys are lower-case.

        Two plugins that offer one name are an error unless ``plugins.prefer["<kind>/<name>"]`` chooses.
        The core's own entries give way to a plugin's, and an installed plugin's to one that ``plugins.load`` names.
        """
        self.load_backends()
        offers: dict[str, list[Answer]] = {}
        for answer in self.ask(hook):
            for name, entry in answer.value.items():
                offers.setdefault(name.lower(), []).append(Answer(answer.plugin, entry))
        return {name: self._pick(kind, name, rows) for name, rows in offers.items()}

    def _pick(self, kind: str, name: str, rows: list[Answer]) -> Answer:
        outside = [r for r in rows if r.plugin.module != BUILTIN]
        wanted = next((v for k, v in self.settings.prefer.items() if k.lower() == f"{kind}/{name}"), None)
        if wanted is not None:
            chosen = [r for r in rows if r.plugin.dist == wanted]
            if not chosen:
                raise PluginError(f"plugins.prefer: {wanted!r} does not offer {kind} {name!r}")
            return chosen[0]
        if by_hand := [r for r in outside if r.plugin.dist == LOADED]:
            outside = by_hand
        if len(outside) > 1:
            both = " and ".join(f"{r.plugin.dist} {r.plugin.version}" for r in outside)
            raise PluginError(
                f"{kind} {name!r} is offered by {both}; choose one with "
                f'"plugins": {{"prefer": {{"{kind}/{name}": "{outside[0].plugin.dist}"}}}}'
            )
        return (outside or rows)[0]

    def observers(self, hook: str) -> list[Observer]:
        """The implementations of an observer hook, each to be called through `Observer.__call__`."""
        return [Observer(self, hook, impl, self._by_module[impl.plugin_name]) for impl in self._impls(hook)]

    def switch_off(self, found: Found, why: str) -> None:
        """Mark a plugin that failed at run time; it is not called again."""
        report = self._reports[found]
        if report.state is not PluginState.SWITCHED_OFF:
            report.state, report.why = PluginState.SWITCHED_OFF, why
            log.warning("%s; the plugin is switched off and training goes on", why)

    def is_off(self, found: Found) -> bool:
        """True once the plugin was switched off."""
        return self._reports[found].state is PluginState.SWITCHED_OFF

    def loaded_versions(self) -> dict[str, str]:
        """Module -> distribution and version of all that is loaded: part of the cross-rank fingerprint."""
        return {m: f"{f.dist} {f.version}" for m, f in sorted(self._by_module.items())}

    def _impls(self, hook: str) -> list[pluggy.HookImpl]:
        caller = cast(pluggy.HookCaller, getattr(self._manager.hook, hook))
        return list(reversed(caller.get_hookimpls()))


@dataclass(frozen=True, slots=True)
class Observer:
    """One plugin's observer; a failure in it is one warning, and then silence."""

    plugins: Plugins
    hook: str
    impl: pluggy.HookImpl
    found: Found

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        if self.plugins.is_off(self.found):
            return
        function: Callable[..., Any] = self.impl.function
        try:
            function(*[arguments[a] for a in self.impl.argnames])
        except Exception as error:
            self.plugins.switch_off(
                self.found, f"plugin {self.found} failed in {self.hook}: {type(error).__name__}: {error}"
            )


def _core_version() -> str:
    from ds_core._version import __version__

    return __version__
