"""Finding and loading plugins, and who of them takes part in a run (torch-free).

Entry-point *names* are read first and nothing is imported. A section's plugin is imported when the
config names the section; backends (things chosen by name or hardware) when a choice is to be made.
Names are sorted, because file order differs between hosts and every rank must call hooks in one
order.

[Note: who takes part] Being installed is not enough to change a run. A plugin *takes part* when the
config names it (its section, ``plugins.load``, ``plugins.require``) or when something that it
offers was chosen. Hooks with arguments are called only of those; hooks without arguments, which say
what a plugin offers, of all that are loaded.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, cast

import pluggy

from ds_core import __version__
from ds_core.errors import PluginError, UsageError
from ds_core.moved import HOOKS_BEFORE, check_contract
from ds_core.plugins import hookspecs
from ds_core.plugins.calls import Implementation
from ds_core.plugins.checks import blaming
from ds_core.plugins.discovery import (
    BACKENDS,
    HOOKS,
    SECTIONS,
    Found,
    PluginState,
    Report,
    discover,
    hooks_of,
    kit_hooks,
    unmet,
    unmet_entries,
)

AUTOLOAD_OFF = "DS_PLUGINS_DISABLE_AUTOLOAD"
BUILTIN = "ds_core.setup.builtin"
LOADED = "loaded by "
"""Begins what stands instead of a distribution, for modules that the config loads and for what
`initialize` is given.
"""

log = logging.getLogger("ds_core.plugins")


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The ``plugins`` section, already validated."""

    require: Sequence[str] = ()
    disable: Sequence[str] = ()
    load: Sequence[str] = ()
    prefer: Mapping[str, str] = field(default_factory=dict)


class _Manager(pluggy.PluginManager):
    """pluggy, with every function whose name starts with ``ds_`` taken as a hook."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if not name.startswith("ds_") or not inspect.isroutine(getattr(plugin, name, None)):
            return None
        return super().parse_hookimpl_opts(plugin, name) or pluggy.HookimplOpts(
            wrapper=False,
            hookwrapper=False,
            optionalhook=False,
            tryfirst=False,
            trylast=False,
            specname=None,
        )


class Registry:
    """The plugins of one run: what is installed, what is loaded, and who takes part.

    found: entry points to use instead of the installed ones (tests).
    given: modules and objects that take part, as if ``plugins.load`` named them.
    """

    def __init__(
        self,
        settings: PluginSettings | None = None,
        found: Iterable[Found] | None = None,
        given: Iterable[object] = (),
    ) -> None:
        self.settings = settings or PluginSettings()
        self._manager = _Manager("ds_core")
        self._manager.add_hookspecs(hookspecs)
        self._reports: dict[Found, Report] = {}
        # The modules of loaded plugins, with their entry points.
        self._by_module: dict[str, Found] = {}
        # The modules of those that take part.
        self._members: set[str] = set()
        installed = discover() if found is None else tuple(sorted(found))
        autoload = found is not None or not os.environ.get(AUTOLOAD_OFF)
        for item in installed:
            off = "" if autoload else f"{AUTOLOAD_OFF} is set"
            if item.name in self.settings.disable or item.dist in self.settings.disable:
                off = "plugins.disable names it"
            self._reports[item] = Report(
                item, PluginState.DISABLED if off else PluginState.AVAILABLE, off
            )
        self._load_new(Found("core", BACKENDS, BUILTIN, "dscore-train", __version__))
        wrong = [*unmet_entries(self.settings.require)]
        if not wrong:
            self._load_required()
        wrong += self._load_named_modules()
        if wrong:
            many = [f"{len(wrong)} problems", *wrong]
            raise PluginError("\n  - ".join(many if wrong[1:] else wrong))
        self._load_given(given)

    # -- loading -----------------------------------------------------------------------------------

    def section(self, name: str) -> Found | None:
        """The plugin that owns config section `name`, or None when no enabled plugin claims it.

        Raises PluginError when two distributions claim it and ``plugins.prefer`` does not choose.
        """
        owners = [found for found in self._claims() if found.name == name]
        return self._choose(name, f"section {name!r}", owners) if owners else None

    def sections(self) -> list[str]:
        """Every section name that an installed and enabled plugin claims."""
        return list(dict.fromkeys(found.name for found in self._claims()))

    def disabled(self) -> dict[str, str]:
        """Section name -> why an installed plugin that claims it is disabled."""
        rows = [r for r in self._reports.values() if r.state is PluginState.DISABLED]
        return {r.found.name: r.why for r in rows if r.found.group == SECTIONS}

    def load_sections(self, names: Iterable[str]) -> dict[str, Found]:
        """Import the owners of `names`, which take part from now on; names that no plugin claims
        are left out.

        Raises PluginError when a named plugin is broken: the config asked for it.
        """
        chosen = {name: owner for name in names if (owner := self.section(name)) is not None}
        for name in sorted(chosen, reverse=True):  # pluggy calls last-in first
            self._load(chosen[name])
            self.join(chosen[name])
        return chosen

    def reports(self) -> list[Report]:
        """Every known plugin in name order."""
        return [self._reports[f] for f in sorted(self._reports)]

    def quarantined(self) -> str:
        """What to add to "no plugin offers this": which could not be asked, and why; "" when all
        could.
        """
        rows = [r.why for r in self.reports() if r.state is PluginState.QUARANTINED]
        return "".join(f"; quarantined: {why}" for why in rows)

    def _claims(self) -> list[Found]:
        """Who claims a section, quarantined ones included; one that the config loads wins over an
        installed one.
        """
        rows = [f for f, r in sorted(self._reports.items()) if r.state is not PluginState.DISABLED]
        rows = [f for f in rows if f.group == SECTIONS]
        by_hand = {f.name for f in rows if f.dist.startswith(LOADED)}
        return [f for f in rows if f.dist.startswith(LOADED) or f.name not in by_hand]

    def _try_all(self, group: str) -> None:
        """Import a group, once.

        A broken plugin is quarantined: the config has not asked for it by name yet.
        """
        for report in reversed(self.reports()):
            if report.found.group == group and report.state is PluginState.AVAILABLE:
                try:
                    self._load(report.found)
                except PluginError as error:
                    self._set_aside(report.found, error)

    def _set_aside(self, found: Found, error: PluginError, level: int = logging.INFO) -> None:
        """Quarantine a plugin; one that takes part is fatal instead."""
        if found.module in self._members:
            raise error
        for report in self._reports.values():
            if report.found == found or (
                report.found.module == found.module and found.module in self._by_module
            ):
                report.state = PluginState.QUARANTINED
                report.why = str(error)
        log.log(level, "plugin quarantined: %s", error)

    def _choose(self, key: str, what: str, owners: Sequence[Found]) -> Found:
        """Which of `owners` serves: the one that ``plugins.prefer`` names under `key`, else the
        only one.

        What ``plugins.load`` names or `initialize` was given wins over installed plugins, and these
        over the core.
        """
        wanted = next(
            (dist for k, dist in self.settings.prefer.items() if k.lower() == key.lower()), None
        )
        if wanted is not None:
            if chosen := [o for o in owners if o.dist == wanted]:
                return chosen[0]
            raise PluginError(
                f"plugins.prefer: {wanted!r} does not offer {what}{self.quarantined()}"
            )
        outside = [o for o in owners if o.module != BUILTIN] or owners
        best = [o for o in outside if o.dist.startswith(LOADED)] or outside
        if len({(o.dist, o.module) for o in best}) > 1:
            both = " and ".join(o.owner for o in best)
            raise PluginError(
                f"{what} is offered by {both}; choose one with "
                f'"plugins": {{"prefer": {{"{key}": "{best[0].dist}"}}}} or uninstall the other'
            )
        return best[0]

    def _load_required(self) -> None:
        """What ``plugins.require`` names must load; backends among it take part, sections when the
        config has them.
        """
        if not self.settings.require:
            return
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        wanted = {canonicalize_name(Requirement(text).name) for text in self.settings.require}
        for found, report in sorted(self._reports.items(), reverse=True):
            if canonicalize_name(found.dist) not in wanted or found.module == BUILTIN:
                continue
            if report.state is PluginState.DISABLED and AUTOLOAD_OFF not in report.why:
                raise PluginError(
                    f"plugins.require names {found.dist}, but {report.why}; take it out of one of "
                    "them"
                )
            if report.state is PluginState.AVAILABLE:
                self._load(found)
            if found.group == BACKENDS and report.state is PluginState.LOADED:
                self.join(found)

    def _load_named_modules(self) -> Iterator[str]:
        """Load what ``plugins.load`` names; gives what is wrong with those that fail."""
        for item in reversed(self.settings.load):  # pluggy calls last-in first
            name, _, module = item.rpartition("=")
            group = SECTIONS if name else BACKENDS
            found = Found(
                (name or module).strip(), group, module.strip(), LOADED + "plugins.load", ""
            )
            try:
                self._load_new(found)
            except PluginError as error:
                yield str(error)

    def _load_given(self, given: Iterable[object]) -> None:
        """Load modules and objects. Their sections are named by `ds_config`, or by the module or
        class.
        """
        for index, plugin in reversed([*enumerate(given)]):  # pluggy calls last-in first
            if isinstance(plugin, (str, type)):
                raise UsageError(
                    f"initialize(plugins=): item {index} is {plugin!r}; give a module, or an object "
                    "with methods such as ds_step_end (plugins.load of the config takes names)"
                )
            path = getattr(plugin, "__name__", f"{index}.{type(plugin).__qualname__}")
            found = Found(path, BACKENDS, path, LOADED + "initialize(plugins=)", "")
            hooks = ModuleType(path)
            for name in dir(plugin):
                if name.lower().startswith("ds_"):
                    setattr(hooks, name, getattr(plugin, name))
            self._load_new(found, hooks)
            for described in self._implementations("ds_config", {path}):
                model = described.answer({})
                own = [path.rpartition(".")[2]]
                for name in model if isinstance(model, Mapping) else own:
                    self._load_new(replace(found, name=name, group=SECTIONS))

    def _load_new(self, found: Found, plugin: Any = None) -> None:
        """Load what is not installed as a plugin; it takes part."""
        for other in self._reports:
            if (
                other.dist.startswith(LOADED)
                and replace(found, module=other.module, dist=other.dist) == other != found
            ):
                raise PluginError(
                    f"section {found.name!r} is offered by {other} and {found}; leave one out"
                )
        self._reports[found] = Report(found, PluginState.AVAILABLE)
        self._load(found, plugin)
        self.join(found)

    def _load(self, found: Found, plugin: Any = None) -> None:
        report = self._reports[found]
        if report.state is PluginState.LOADED:
            return
        if report.state is PluginState.QUARANTINED:
            raise PluginError(report.why)
        if found.module in self._by_module:  # one module may be in both entry-point groups
            report.state = PluginState.LOADED
            report.hooks = self._reports[self._by_module[found.module]].hooks
            return
        if lacking := unmet(found.dist):
            raise PluginError(f"plugin {found} cannot be used: {lacking}")
        if ":" in found.module:
            raise PluginError(
                f"plugin {found} names an attribute; the value of its entry point must be a module "
                "alone"
            )
        with blaming(found, "failed to import"):
            module = plugin or importlib.import_module(found.module)
        hooks: Any = module
        if hasattr(module, "DS_CONTRACT"):
            check_contract(found, module.DS_CONTRACT)
        # The forms of earlier contracts are loaded for plugins that have them only.
        if HOOKS_BEFORE & vars(module).keys():
            from ds_core.plugins.old_forms import adapted

            hooks = adapted(module)
        try:
            report.hooks = hooks_of(hooks)
            self._specify(report.hooks)
            self._manager.register(hooks, name=found.module)
        except PluginError as error:
            raise PluginError(f"plugin {found} {error}") from None
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.is_registered(hooks):
                self._manager.unregister(hooks)
            raise PluginError(
                f"plugin {found} does not fit the hooks: {' '.join(str(error).split())}"
            ) from error
        report.state = PluginState.LOADED
        self._by_module[found.module] = found

    def _specify(self, names: Iterable[str]) -> None:
        """Tell pluggy of hooks that packages define, when the first plugin has one of them."""
        for name in names:
            if name in kit_hooks() and not hasattr(self._manager.hook, name):
                self._manager.add_hookspecs(type(name, (), {name: staticmethod(HOOKS[name])}))

    # -- taking part -------------------------------------------------------------------------------

    def join(self, found: Found) -> None:
        """From now on this plugin takes part: something that it offers was chosen."""
        self._members.add(found.module)

    def members(self) -> frozenset[str]:
        """The modules of the plugins that take part."""
        return frozenset(self._members)

    def loaded_versions(self) -> dict[str, str]:
        """Module -> distribution and version of all that is loaded: part of the cross-rank
        fingerprint.
        """
        return {m: f.owner for m, f in sorted(self._by_module.items())}

    def _implementations(self, hook: str, among: Container[str]) -> Iterator[Implementation]:
        """What the modules `among` implement of `hook`, in plugin order; not of those that are
        quarantined.
        """
        if hook not in HOOKS:
            raise PluginError(
                f"no installed package has a hook {hook!r}; known hooks: {', '.join(sorted(HOOKS))}"
            )
        self._specify([hook])
        caller = cast(pluggy.HookCaller, getattr(self._manager.hook, hook))
        for impl in reversed(caller.get_hookimpls()):
            found = self._by_module[impl.plugin_name]
            if found.module in among and self._reports[found].state is not PluginState.QUARANTINED:
                yield Implementation(hook, found, impl)
