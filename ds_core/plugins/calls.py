"""Calling what plugins brought: what they answer, and whose fault it is when it fails (torch-free).

[Note: three tiers of failure] A broken plugin that does not take part is quarantined and shown by
``dscore doctor``. One that takes part is fatal. At run time an observer or monitor that fails is
switched off after one warning; anything on the data path is always fatal, since a silent fallback
makes ranks diverge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.entries import Ref, resolve
from ds_core.errors import ConfigError
from ds_core.plugins.checks import blame, blaming
from ds_core.plugins.discovery import HOOKS, Found, PluginState, Report

if TYPE_CHECKING:
    import pluggy


log = logging.getLogger("ds_core.plugins")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one plugin answered to one hook."""

    plugin: Found
    value: Any

    def resolve(self, ref: Ref | Callable[..., Any], what: str) -> Any:
        """Import what a reference of the plugin's names; a failure is an error of the plugin's.

        what: it is for.
        """
        with blaming(self.plugin, f"cannot serve {what}"):
            return resolve(ref) if isinstance(ref, str) else ref


class Offers(Mapping[str, Answer]):
    """Lower-case name -> the offer that serves it.

    Two offers of one name are an error only when it is looked up.

    rows: name -> plugin -> what it offers.
    choose: which plugin serves a name.
    """

    def __init__(
        self, rows: Mapping[str, Mapping[Found, Any]], choose: Callable[[str], Found]
    ) -> None:
        self._rows = rows
        self._choose = choose

    def __getitem__(self, name: str) -> Answer:
        rows = self._rows[name]  # or KeyError
        chosen = self._choose(name)
        return Answer(chosen, rows[chosen])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, slots=True)
class Implementation:
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

    def __init__(self, call: Implementation, report: Report) -> None:
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
            log.warning("%s; the plugin is switched off and training continues", why)
            return None
