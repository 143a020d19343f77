"""Finding, loading and asking plugins (torch-free).

Entry-point *names* are read first and nothing is imported. A section's plugin is imported when the config
names the section; backends (things chosen by name or hardware) when a choice is to be made. Names are sorted,
because file order differs between hosts and every rank must call hooks in one order.

[Note: who takes part] Being installed is not enough to change a run. A plugin *takes part* when the config names it
(its section, ``plugins.load``, ``plugins.require``) or when something that it offers was chosen. Hooks with arguments
are called only of those; what a plugin offers (hooks without arguments) is asked of all that are loaded.

[Note: three tiers of failure] A broken plugin that does not take part is quarantined and shown by ``dscore doctor``.
One that takes part is fatal. At run time an observer or monitor that fails is switched off after one warning; anything
on the data path is always fatal, since a silent fallback makes ranks diverge.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TextIO, cast

import pluggy

from ds_core import hookspecs
from ds_core.answers import WrongAnswer, check_of
from ds_core.discovery import (
    BACKENDS,
    HOOKS,
    OFFERS,
    SECTIONS,
    Answer,
    Found,
    Heard,
    Offers,
    blaming,
    check_required,
    discover,
    hooks_of,
    reset_discovery,
    unmet,
)
from ds_core.errors import PluginError

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = [
    "BACKENDS",
    "SECTIONS",
    "Answer",
    "Found",
    "Offers",
    "PluginState",
    "Plugins",
    "Report",
    "blaming",
    "discover",
    "reset_discovery",
]

AUTOLOAD_OFF = "DS_PLUGINS_DISABLE_AUTOLOAD"
BUILTIN = "ds_core.builtin"
LOADED = "plugins.load"  # stands for the distribution of modules that the config loads by hand

log = logging.getLogger("ds_core.plugins")


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
        self._reports: dict[Found, Report] = {}
        self._by_module: dict[str, Found] = {}
        self._members: set[str] = set()
        self._aside: set[str] = set()
        self._backends_loaded = False
        installed = discover() if found is None else tuple(sorted(found))
        autoload = found is not None or not os.environ.get(AUTOLOAD_OFF)
        for item in installed:
            off = "" if autoload else f"{AUTOLOAD_OFF} is set"
            if item.name in self.settings.disable or item.dist in self.settings.disable:
                off = "plugins.disable names it"
            self._reports[item] = Report(item, PluginState.DISABLED if off else PluginState.AVAILABLE, off)
        core = Found("core", BACKENDS, BUILTIN, "ds-core", _core_version())
        self._reports[core] = Report(core, PluginState.AVAILABLE)
        self._load(core)
        self.join(core)
        self._load_required()
        self._load_named_modules()

    # -- loading ---------------------------------------------------------------------------------------------

    def section(self, name: str) -> Found | None:
        """The plugin that owns config section `name`, or None when no enabled plugin claims it.

        Raises PluginError when two distributions claim it and ``plugins.prefer`` does not choose.
        """
        return self._choose(name, [r.found for r in self._claims() if r.found.name == name])

    def sections(self) -> dict[str, Found]:
        """Every section name that an installed and enabled plugin claims; of several owners the first."""
        owners: dict[str, Found] = {}
        for report in self._claims():
            owners.setdefault(report.found.name, report.found)
        return owners

    def disabled(self, name: str) -> Report | None:
        """The report of an installed but disabled owner of section `name`, for error messages."""
        rows = (r for r in self._reports.values() if r.found.name == name and r.found.group == SECTIONS)
        return next((r for r in rows if r.state is PluginState.DISABLED), None)

    def load_sections(self, names: Iterable[str]) -> dict[str, Found]:
        """Import the owners of `names`, which take part from now on; names that nobody claims are left out.

        Raises PluginError when a named plugin is broken: the config asked for it.
        """
        chosen = {name: owner for name in names if (owner := self.section(name)) is not None}
        for name in sorted(chosen, reverse=True):  # pluggy calls last-in first
            self._load(chosen[name])
            self.join(chosen[name])
        return chosen

    def load_backends(self) -> None:
        """Import every backend, once. A broken one is quarantined: nobody has asked for it by name yet."""
        if not self._backends_loaded:
            self._backends_loaded = True
            self._try_all(BACKENDS)

    def probe_all(self) -> list[Report]:
        """Import everything installed, quarantining what breaks."""
        self._try_all(SECTIONS)
        self.load_backends()
        return self.reports()

    def examine(self) -> list[Report]:
        """`probe_all`, and ask everybody what they offer; for ``dscore plugins`` and ``doctor``."""
        for report in self.probe_all():
            if report.found.group == SECTIONS and report.state is PluginState.LOADED:
                try:
                    self.model(report.found)
                except PluginError as error:
                    self._set_aside(report.found, error)
        for hook in OFFERS:
            self.offers(hook)
        return self.reports()

    def reports(self) -> list[Report]:
        """Every known plugin in name order."""
        return [self._reports[f] for f in sorted(self._reports)]

    def quarantined(self) -> str:
        """What to add to "nobody offers this": who could not be asked, and why; "" when all could."""
        rows = [r.why for r in self.reports() if r.state is PluginState.QUARANTINED]
        return "".join(f"; quarantined: {why}" for why in rows)

    def _claims(self) -> list[Report]:
        """Who claims a section: also who is quarantined, so that naming it tells why; by hand wins over installed."""
        rows = [r for f, r in sorted(self._reports.items()) if f.group == SECTIONS]
        rows = [r for r in rows if r.state is not PluginState.DISABLED]
        by_hand = {r.found.name for r in rows if r.found.dist == LOADED}
        return [r for r in rows if r.found.dist == LOADED or r.found.name not in by_hand]

    def _try_all(self, group: str) -> None:
        off = (PluginState.DISABLED, PluginState.QUARANTINED)
        for found in reversed([f for f, r in sorted(self._reports.items()) if f.group == group and r.state not in off]):
            try:
                self._load(found)
            except PluginError as error:
                self._set_aside(found, error)

    def _set_aside(self, found: Found, error: PluginError, level: int = logging.INFO) -> None:
        """Quarantine a plugin; one that takes part is fatal instead."""
        if found.module in self._members:
            raise error
        for report in self._reports.values():
            if report.found == found or (report.found.module == found.module and found.module in self._by_module):
                report.state, report.why = PluginState.QUARANTINED, str(error)
        self._aside.add(found.module)
        log.log(level, "plugin quarantined: %s", error)

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

    def _load_required(self) -> None:
        """What ``plugins.require`` names must load; backends among it take part, sections when the config has them."""
        if not self.settings.require:
            return
        from packaging.utils import canonicalize_name

        wanted = set(check_required(self.settings.require))
        for found, report in sorted(self._reports.items(), reverse=True):
            if canonicalize_name(found.dist) not in wanted or found.module == BUILTIN:
                continue
            if report.state is PluginState.DISABLED and AUTOLOAD_OFF not in report.why:
                raise PluginError(f"plugins.require names {found.dist}, but {report.why}; take it out of one of them")
            if report.state is PluginState.AVAILABLE:
                self._load(found)
            if found.group == BACKENDS and report.state is PluginState.LOADED:
                self.join(found)

    def _load_named_modules(self) -> None:
        for item in reversed(self.settings.load):  # pluggy calls last-in first
            name, _, module = item.rpartition("=")
            group = SECTIONS if name else BACKENDS
            found = Found((name or module).strip(), group, module.strip(), LOADED, "0")
            if name and any(f.dist == LOADED and f.name == found.name and f.group == SECTIONS for f in self._reports):
                raise PluginError(f"plugins.load names two modules for section {found.name!r}; leave one out")
            self._reports[found] = Report(found, PluginState.AVAILABLE)
            self._load(found)
            self.join(found)

    def _load(self, found: Found) -> None:
        report = self._reports[found]
        if report.state is PluginState.LOADED:
            return
        if report.state is PluginState.QUARANTINED:
            raise PluginError(report.why)
        if found.module in self._by_module:  # one module may stand in both groups
            report.state, report.hooks = PluginState.LOADED, self._reports[self._by_module[found.module]].hooks
            return
        if (lacking := unmet(found.dist)) != "":
            raise PluginError(f"plugin {found} cannot be used: {lacking}")
        if ":" in found.module:
            raise PluginError(f"plugin {found} names an attribute; the value of its entry point must be a module alone")
        stdout = Heard(sys.stdout)
        with blaming(found, "failed to import"), contextlib.redirect_stdout(cast(TextIO, stdout)):
            module = importlib.import_module(found.module)
        try:
            report.hooks = hooks_of(module)
            self._manager.register(module, name=found.module)
        except PluginError as error:
            raise PluginError(f"plugin {found} {error}") from None
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.is_registered(module):
                self._manager.unregister(module)
            raise PluginError(f"plugin {found} does not fit the hooks: {' '.join(str(error).split())}") from error
        if stdout.text.strip():
            report.why = f"prints when it is imported: {stdout.text.strip()[:80]!r}"
            log.warning("plugin %s %s", found, report.why)
        report.state = PluginState.LOADED
        self._by_module[found.module] = found

    # -- taking part -------------------------------------------------------------------------------------------

    def join(self, found: Found) -> None:
        """From now on this plugin takes part: something that it offers was chosen."""
        self._members.add(found.module)

    def members(self) -> frozenset[str]:
        """The modules of the plugins that take part."""
        return frozenset(self._members)

    # -- asking ----------------------------------------------------------------------------------------------

    def ask(self, hook: str, *, newer_than: frozenset[str] = frozenset(), **arguments: Any) -> list[Answer]:
        """What those who take part answer to `hook`, in plugin order; None is left out. Errors are fatal.

        newer_than: leave out those who took part by then.
        """
        if hook in OFFERS:
            return self.offers(hook)
        rows = [i for i in self._impls(hook) if i.plugin_name in self._members and i.plugin_name not in newer_than]
        answers = [Answer(self._by_module[i.plugin_name], self._call(hook, i, arguments)) for i in rows]
        return [a for a in answers if a.value is not None]

    def offers(self, hook: str) -> list[Answer]:
        """What every loaded plugin offers through `hook`, in plugin order.

        One whose answer fails is quarantined, or fatal when it takes part.
        """
        self.load_backends()
        answers = []
        for impl in self._impls(hook):
            found = self._by_module[impl.plugin_name]
            try:
                answers.append(Answer(found, self._call(hook, impl, {})))
            except PluginError as error:
                self._set_aside(found, error, logging.WARNING)
        return answers

    def _call(self, hook: str, impl: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
        found = self._by_module[impl.plugin_name]
        check = check_of(HOOKS[hook])
        with blaming(found, f"failed in {hook}"):
            try:
                return check(impl.function(*[arguments[a] for a in impl.argnames]))
            except WrongAnswer as error:
                raise WrongAnswer(f"it {error}") from None

    def ask_one(self, hook: str, plugin: Found, **arguments: Any) -> Any:
        """Call `hook` of one loaded plugin; None when the plugin does not implement it."""
        for impl in self._impls(hook):
            if impl.plugin_name == plugin.module:
                return self._call(hook, impl, arguments)
        return None

    def model(self, owner: Found) -> type[BaseModel]:
        """The model of the section that a loaded plugin owns; PluginError when it does not describe it."""
        found: type[BaseModel] | None = self.ask_one("ds_config", owner)
        if found is None:
            raise PluginError(f"plugin {owner} claims section {owner.name!r} but has no ds_config hook to describe it")
        return found

    def driver(self, hook: str, *, or_installed: bool = False, **arguments: Any) -> Answer | None:
        """The one answer to a driver hook, or None. Two answers are an error that names both.

        or_installed: where none of those who take part answers, ask every backend; the one that answers takes part.
        """
        answers = self.ask(hook, **arguments)
        if or_installed and not answers:
            answers = self._ask_backends(hook, arguments)
        if len(answers) > 1:
            both = " and ".join(str(a.plugin) for a in answers)
            raise PluginError(f"{hook} is answered by {both}; only one can drive: disable one with plugins.disable")
        if or_installed and answers:
            self.join(answers[0].plugin)
        return answers[0] if answers else None

    def _ask_backends(self, hook: str, arguments: Mapping[str, Any]) -> list[Answer]:
        self.load_backends()
        backends = {found.module for found in self._reports if found.group == BACKENDS}
        rows = [impl for impl in self._impls(hook) if impl.plugin_name in backends]
        answers = [Answer(self._by_module[i.plugin_name], self._call(hook, i, arguments)) for i in rows]
        return [a for a in answers if a.value is not None]

    def named(self, hook: str, kind: str) -> Offers:
        """Merge the name -> entry mappings of a by-name driver hook; keys are lower-case.

        Two plugins that offer one name are an error when it is looked up, unless ``plugins.prefer["<kind>/<name>"]``
        chooses. The core's own entries give way to a plugin's, and an installed plugin's to one that ``plugins.load``
        names.
        """
        offers: dict[str, list[Answer]] = {}
        for answer in self.offers(hook):
            for name, entry in answer.value.items():
                offers.setdefault(name.lower(), []).append(Answer(answer.plugin, entry))
        return Offers(offers, lambda name, rows: self._pick(kind, name, rows))

    def _pick(self, kind: str, name: str, rows: list[Answer]) -> Answer:
        outside = [r for r in rows if r.plugin.module != BUILTIN]
        wanted = next((v for k, v in self.settings.prefer.items() if k.lower() == f"{kind}/{name}"), None)
        if wanted is not None:
            chosen = [r for r in rows if r.plugin.dist == wanted]
            if not chosen:
                raise PluginError(f"plugins.prefer: {wanted!r} does not offer {kind} {name!r}{self.quarantined()}")
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

    def implementing(self, hook: str) -> list[Found]:
        """Those who take part and implement `hook`, in plugin order."""
        return [self._by_module[i.plugin_name] for i in self._impls(hook) if i.plugin_name in self._members]

    def merged(self, hook: str, *, installed: bool = False, **arguments: Any) -> dict[str, Answer]:
        """Merge the mappings that `hook` gives. Two plugins with one name are an error that names both.

        installed: ask every backend, not those who take part.
        """
        merged: dict[str, Answer] = {}
        for answer in self._ask_backends(hook, arguments) if installed else self.ask(hook, **arguments):
            for name, value in answer.value.items():
                if name in merged:
                    raise PluginError(f"{hook}: {name!r} is given by plugins {merged[name].plugin} and {answer.plugin}")
                merged[name] = Answer(answer.plugin, value)
        return merged

    def observers(self, hook: str) -> list[Observer]:
        """The observers of those who take part, each to be called through `Observer.__call__`."""
        rows = [i for i in self._impls(hook) if i.plugin_name in self._members]
        return [Observer(self, hook, impl, self._by_module[impl.plugin_name]) for impl in rows]

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
        return [i for i in reversed(caller.get_hookimpls()) if i.plugin_name not in self._aside]


@dataclass(frozen=True, slots=True)
class Observer:
    """One plugin's observer; a failure in it is one warning, and then silence."""

    plugins: Plugins
    hook: str
    impl: pluggy.HookImpl
    found: Found

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """What the plugin answers; None when it has failed, now or before."""
        if self.plugins.is_off(self.found):
            return None
        function: Callable[..., Any] = self.impl.function
        try:
            return check_of(HOOKS[self.hook])(function(*[arguments[a] for a in self.impl.argnames]))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            kind = "it " if isinstance(error, WrongAnswer) else f"{type(error).__name__}: "
            self.plugins.switch_off(self.found, f"plugin {self.found} failed in {self.hook}: {kind}{error}")
            return None


def _core_version() -> str:
    from ds_core import __version__

    return __version__
