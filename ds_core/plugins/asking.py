"""Asking plugins: the calls of every hook, and what comes of several answers (torch-free).

[Note: who takes part] and how plugins are loaded: `ds_core.plugins.registry`. What a failure leads to:
`ds_core.plugins.calls`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ds_core.errors import PluginError, UsageError
from ds_core.plugins.calls import Answer, Observer, Offers
from ds_core.plugins.discovery import BACKENDS, SECTIONS, Found, PluginState, Report, offers
from ds_core.plugins.registry import Registry

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.entries import Axis


class Plugins(Registry):
    """The plugins of one run, and the one way to ask them."""

    # -- who takes part ----------------------------------------------------------------------------

    def ask(
        self,
        hook: str,
        *,
        newer_than: frozenset[str] = frozenset(),
        installed: bool = False,
        **arguments: Any,
    ) -> list[Answer]:
        """What those who take part answer to `hook`, in plugin order; None is left out.

        Errors are fatal.

        newer_than: leave out those who took part by then.
        installed: ask every backend, also one that takes no part.
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

    def implementing(self, hook: str) -> list[Found]:
        """Those who take part and implement `hook`, in plugin order."""
        return [i.plugin for i in self._implementations(hook, self._members)]

    def observers(self, hook: str) -> list[Observer]:
        """The observers of those who take part, each to be called through `Observer.__call__`."""
        return [
            Observer(i, self._reports[i.plugin]) for i in self._implementations(hook, self._members)
        ]

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
        # Those who take part go first: the config has named them.
        others = {"installed": True, "newer_than": self.members(), **arguments}
        answer = self.driver(hook, **arguments) or self.driver(hook, **others)
        if answer is not None:
            return answer.value
        from ds_core.catalogue import missing

        asked = ", ".join(str(i.plugin) for i in self._implementations(hook, self._by_module))
        why = f"{asked} does not" if asked else missing("drivers", hook, more=self.quarantined())
        raise UsageError(f"{needed}: {why}")

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

    def mesh_axes(self, config: RunConfig) -> list[Axis]:
        """The axes that those who take part add to a run's mesh."""
        return [axis for answer in self.ask("ds_mesh_axes", config=config) for axis in answer.value]

    # -- what is offered ---------------------------------------------------------------------------

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
        return {name: (self.model(f), f.owner) for name, f in self.load_sections(names).items()}

    # -- everything that is installed --------------------------------------------------------------

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
