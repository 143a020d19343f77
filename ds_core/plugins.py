"""Finding, loading and asking plugins (torch-free).

Entry-point *names* are read first and nothing is imported. A section's plugin is imported when the
config names the section; backends (things chosen by name or hardware) when a choice is to be made.
Names are sorted, because file order differs between hosts and every rank must call hooks in one
order.

[Note: who takes part] Being installed is not enough to change a run. A plugin *takes part* when the
config names it (its section, ``plugins.load``, ``plugins.require``) or when something that it
offers was chosen. Hooks with arguments are called only of those; hooks without arguments, which say
what a plugin offers, of all that are loaded.

[Note: three tiers of failure] A broken plugin that does not take part is quarantined and shown by
``dscore doctor``. One that takes part is fatal. At run time an observer or monitor that fails is
switched off after one warning; anything on the data path is always fatal, since a silent fallback
makes ranks diverge.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import pluggy

from ds_core import __version__, hookspecs
from ds_core.discovery import (
    BACKENDS as BACKENDS,
)
from ds_core.discovery import (
    HOOKS,
    blame,
    check_required,
    hooks_of,
    kit_hooks,
    offers,
    unmet,
)
from ds_core.discovery import (
    SECTIONS as SECTIONS,
)
from ds_core.discovery import (
    Answer as Answer,
)
from ds_core.discovery import (
    Found as Found,
)
from ds_core.discovery import (
    Offers as Offers,
)
from ds_core.discovery import (
    blaming as blaming,
)
from ds_core.discovery import (
    discover as discover,
)
from ds_core.discovery import (
    reset_discovery as reset_discovery,
)
from ds_core.errors import ConfigError, PluginError, UsageError
from ds_core.moved import HOOKS_BEFORE, check_contract

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.entries import Axis

AUTOLOAD_OFF = "DS_PLUGINS_DISABLE_AUTOLOAD"
BUILTIN = "ds_core.builtin"
LOADED = "plugins.load"  # in place of a distribution, for modules that the config loads

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
            wrapper=False,
            hookwrapper=False,
            optionalhook=False,
            tryfirst=False,
            trylast=False,
            specname=None,
        )


class Plugins:
    """The plugins of one run: what is installed, what is loaded, and the one way to ask them.

    found: entry points to use instead of the installed ones (tests).
    """

    def __init__(
        self, settings: PluginSettings | None = None, found: Iterable[Found] | None = None
    ) -> None:
        self.settings = settings or PluginSettings()
        self._manager = _Manager("ds_core")
        self._manager.add_hookspecs(hookspecs)
        self._reports: dict[Found, Report] = {}
        self._by_module: dict[str, Found] = {}  # of what is loaded
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
        self._load_new(Found("core", BACKENDS, BUILTIN, "ds-core", __version__))
        self._load_required()
        self._load_named_modules()

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

    def probe_all(self) -> list[Report]:
        """Import everything installed, quarantining what breaks."""
        self._try_all(SECTIONS)
        self._try_all(BACKENDS)
        return self.reports()

    def examine(self) -> list[Report]:
        """`probe_all`, and ask everybody what they offer; for ``dscore plugins`` and ``doctor``."""
        for report in self.probe_all():
            if report.found.group == SECTIONS and report.state is PluginState.LOADED:
                try:
                    self.model(report.found)
                except PluginError as error:
                    self._set_aside(report.found, error)
        for hook in offers():
            self.offers(hook)
        return self.reports()

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
        by_hand = {f.name for f in rows if f.dist == LOADED}
        return [f for f in rows if f.dist == LOADED or f.name not in by_hand]

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

        Modules that ``plugins.load`` names win over installed plugins, and these over the core.
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
        best = [o for o in outside if o.dist == LOADED] or outside
        if len({(o.dist, o.module) for o in best}) > 1:
            both = " and ".join(f"{o.dist} {o.version}" for o in best)
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
        from packaging.utils import canonicalize_name

        wanted = set(check_required(self.settings.require))
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

    def _load_named_modules(self) -> None:
        for item in reversed(self.settings.load):  # pluggy calls last-in first
            name, _, module = item.rpartition("=")
            group = SECTIONS if name else BACKENDS
            found = Found((name or module).strip(), group, module.strip(), LOADED, "0")
            if name and any(
                f.dist == LOADED and f.name == found.name and f.group == SECTIONS
                for f in self._reports
            ):
                raise PluginError(
                    f"plugins.load names two modules for section {found.name!r}; leave one out"
                )
            self._load_new(found)

    def _load_new(self, found: Found) -> None:
        """Load what is not installed as a plugin; it takes part."""
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
            module = importlib.import_module(found.module)
        hooks: Any = module
        if hasattr(module, "DS_CONTRACT"):
            check_contract(found, module.DS_CONTRACT)
        if HOOKS_BEFORE & vars(module).keys():
            from ds_core.old_forms import adapted

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

    # -- asking ------------------------------------------------------------------------------------

    def ask(
        self,
        hook: str,
        *,
        newer_than: frozenset[str] = frozenset(),
        installed: bool = False,
        **arguments: Any,
    ) -> list[Answer]:
        """What those who take part answer to `hook`, in plugin order; None is left out. Errors are
        fatal.

        newer_than: leave out those who took part by then. installed: ask every backend, also one
        that takes no part.
        """
        among = self._members
        if installed:
            self._try_all(BACKENDS)
            among = among | {found.module for found in self._reports if found.group == BACKENDS}
        answers = [
            Answer(i.plugin, i.answer(arguments))
            for i in self._implementations(hook, among - newer_than)
        ]
        return [a for a in answers if a.value is not None]

    def offers(self, hook: str) -> list[Answer]:
        """What every loaded plugin offers through `hook`, in plugin order.

        One whose answer fails is quarantined, or fatal when it takes part.
        """
        self._try_all(BACKENDS)
        answers = []
        for implementation in self._implementations(hook, self._by_module):
            try:
                answers.append(Answer(implementation.plugin, implementation.answer({})))
            except PluginError as error:
                self._set_aside(implementation.plugin, error, logging.WARNING)
        return answers

    def ask_one(self, hook: str, plugin: Found) -> Any:
        """What one loaded plugin offers through `hook`; None when it does not implement it."""
        return next((i.answer({}) for i in self._implementations(hook, {plugin.module})), None)

    def model(self, owner: Found) -> type[BaseModel]:
        """The model of the section that a loaded plugin owns; PluginError when it does not describe
        it.
        """
        found: Any = self.ask_one("ds_config", owner)
        if isinstance(found, Mapping):
            found = found.get(owner.name)
        if found is None:
            raise PluginError(
                f"plugin {owner} claims section {owner.name!r} but has no ds_config hook to "
                "describe it"
            )
        return cast("type[BaseModel]", found)

    def models(self, names: Iterable[str]) -> dict[str, tuple[type[BaseModel], str]]:
        """Load the owners of the sections `names`; per owned section its model, and its owner's
        name and version.
        """
        return {
            name: (self.model(f), f"{f.dist} {f.version}")
            for name, f in self.load_sections(names).items()
        }

    def driver(self, hook: str, *, installed: bool = False, **arguments: Any) -> Answer | None:
        """The one answer to a driver hook, or None. Two answers are an error that names both.

        installed: ask every backend, also one that takes no part; the one that answers takes part.
        """
        answers = self.ask(hook, installed=installed, **arguments)
        if len(answers) > 1:
            both = " and ".join(str(a.plugin) for a in answers)
            raise PluginError(
                f"{hook} is answered by {both}; only one can drive: disable one with "
                "plugins.disable"
            )
        if not answers:
            return None
        self.join(answers[0].plugin)
        return answers[0]

    def installed_driver(self, hook: str, needed: str, **arguments: Any) -> Any:
        """What answers a driver hook; where none of those who take part does, a backend may.

        Raises UsageError where there is none: the text `needed`, and a package to install.
        """
        others = {"installed": True, "newer_than": self.members(), **arguments}
        answer = self.driver(hook, **arguments) or self.driver(hook, **others)
        if answer is not None:
            return answer.value
        from ds_core.catalogue import missing

        asked = ", ".join(str(i.plugin) for i in self._implementations(hook, self._by_module))
        why = f"{asked} does not" if asked else missing("drivers", hook, more=self.quarantined())
        raise UsageError(f"{needed}: {why}")

    def named(self, hook: str, kind: str) -> Offers:
        """Merge the name -> entry mappings of a by-name driver hook; keys are lower-case.

        Two plugins that offer one name are an error when it is looked up, unless
        ``plugins.prefer["<kind>/<name>"]`` chooses. The core's own entries give way to a plugin's,
        and an installed plugin's to one that ``plugins.load`` names.
        """
        rows: dict[str, dict[Found, Any]] = {}
        for answer in self.offers(hook):
            for name, entry in answer.value.items():
                rows.setdefault(name.lower(), {})[answer.plugin] = entry
        return Offers(
            rows, lambda name: self._choose(f"{kind}/{name}", f"{kind} {name!r}", list(rows[name]))
        )

    def mesh_axes(self, config: RunConfig) -> list[Axis]:
        """The axes that those who take part add to a run's mesh."""
        return [axis for answer in self.ask("ds_mesh_axes", config=config) for axis in answer.value]

    def implementing(self, hook: str) -> list[Found]:
        """Those who take part and implement `hook`, in plugin order."""
        return [i.plugin for i in self._implementations(hook, self._members)]

    def merged(self, hook: str, *, installed: bool = False, **arguments: Any) -> dict[str, Answer]:
        """Merge the mappings that `hook` gives; two values of one name are an error that names
        both.

        installed: see `ask`.
        """
        merged: dict[str, Answer] = {}
        for answer in self.ask(hook, installed=installed, **arguments):
            for name, value in answer.value.items():
                if name in merged and merged[name].value != value:
                    raise PluginError(
                        f"{hook}: {name!r} is given by plugins {merged[name].plugin} and "
                        f"{answer.plugin}"
                    )
                merged[name] = Answer(answer.plugin, value)
        return merged

    def observers(self, hook: str) -> list[Observer]:
        """The observers of those who take part, each to be called through `Observer.__call__`."""
        return [
            Observer(i, self._reports[i.plugin]) for i in self._implementations(hook, self._members)
        ]

    def loaded_versions(self) -> dict[str, str]:
        """Module -> distribution and version of all that is loaded: part of the cross-rank
        fingerprint.
        """
        return {m: f"{f.dist} {f.version}" for m, f in sorted(self._by_module.items())}

    def _implementations(self, hook: str, among: Container[str]) -> Iterator[_Implementation]:
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
                yield _Implementation(hook, found, impl)


@dataclass(frozen=True, slots=True)
class _Implementation:
    """One plugin's function for one hook."""

    hook: str
    plugin: Found
    impl: pluggy.HookImpl

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call it with those of `arguments` that it takes, and check what it returns."""
        return HOOKS[self.hook].ds_answer(
            self.impl.function(*[arguments[a] for a in self.impl.argnames])
        )

    def answer(self, arguments: Mapping[str, Any]) -> Any:
        """Call it; any failure is a PluginError, but for a ConfigError about what it was given."""
        with blaming(
            self.plugin, f"failed in {self.hook}", passing=(ConfigError,) if arguments else ()
        ):
            return self(arguments)


class Observer:
    """One plugin's observer; a failure in it is one warning, and then silence."""

    __slots__ = ("_arguments", "_check", "_function", "_hook", "_report", "plugin")

    def __init__(self, call: _Implementation, report: Report) -> None:
        self.plugin = call.plugin
        self._hook = call.hook
        self._report = report
        # Looked up once: it is called several times a step.
        self._check = HOOKS[call.hook].ds_answer
        self._function = call.impl.function
        self._arguments = call.impl.argnames

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """What the plugin answers; None when it has failed, now or before."""
        if self._report.state is PluginState.SWITCHED_OFF:
            return None
        try:
            return self._check(self._function(*[arguments[name] for name in self._arguments]))
        except BaseException as error:
            why = blame(self.plugin, f"failed in {self._hook}", error)
            self._report.state = PluginState.SWITCHED_OFF
            self._report.why = str(why)
            log.warning("%s; the plugin is switched off and training goes on", why)
            return None
