"""What is installed, read from metadata alone: entry points, and whether a distribution's
requirements are met (torch-free; imports no plugin)."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import importlib_metadata

from ds_core.errors import PluginError, did_you_mean
from ds_core.plugins import hookspecs
from ds_core.plugins.checks import WrongAnswer, blaming, nothing

SECTIONS = "ds_core.plugins"
BACKENDS = "ds_core.backends"

KIT_HOOKS = "ds_core.hooks"
"""The entry points of hooks that packages define: name of the hook -> the module with its
specification.
"""

CORE_HOOKS: dict[str, Any] = {n: f for n, f in vars(hookspecs).items() if n.startswith("ds_")}
OBSERVERS = tuple(n for n, f in CORE_HOOKS.items() if f.ds_observer)
"""The core's hooks in which a failure switches the plugin off, and training continues."""


class Hooks(Mapping[str, Any]):
    """Hook -> its specification.

    Those of installed packages are imported when they are first looked up.
    """

    def __getitem__(self, name: str) -> Any:
        if name in CORE_HOOKS:
            return CORE_HOOKS[name]
        found, *others = kit_hooks()[name]  # or KeyError
        if others:
            raise PluginError(f"hook {found} is defined by {others[0]} too; uninstall one of them")
        with blaming(found, f"cannot specify {name}"):
            spec = getattr(importlib.import_module(found.module), name)
            if not hasattr(spec, "ds_answer"):
                raise WrongAnswer(
                    "it is not marked by ds_core.plugins.checks.gives, which says what it may return"
                )
        return spec

    def __contains__(self, name: object) -> bool:
        return name in CORE_HOOKS or name in kit_hooks()

    def __iter__(self) -> Iterator[str]:
        return iter((*CORE_HOOKS, *kit_hooks()))

    def __len__(self) -> int:
        return len(CORE_HOOKS) + len(kit_hooks())


HOOKS = Hooks()


def offers() -> tuple[str, ...]:
    """Hooks without arguments: they say what a plugin offers. All others take part in a run."""
    found = []
    for name in HOOKS:
        try:
            if not inspect.signature(HOOKS[name]).parameters:
                found.append(name)
        # A hook of a package's; plugins that implement it get the error.
        except PluginError as error:
            log.warning("%s", error)
    return tuple(found)


log = logging.getLogger("ds_core.plugins")


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """An entry point, not yet imported. `name` is the config section in group SECTIONS."""

    name: str
    group: str
    module: str
    dist: str
    version: str

    @property
    def owner(self) -> str:
        """Its distribution and version, or what loaded it."""
        return f"{self.dist} {self.version}".strip()

    @property
    def owns_section(self) -> bool:
        """Whether `name` is a section of configs."""
        return self.group == SECTIONS

    def __str__(self) -> str:
        return f"{self.name!r} ({self.owner}, module {self.module})"


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


def discover() -> tuple[Found, ...]:
    """Every entry point of plugins, sorted; reads metadata only and imports nothing."""
    return tuple(found for found in _entry_points() if found.group != KIT_HOOKS)


@functools.cache
def kit_hooks() -> Mapping[str, tuple[Found, ...]]:
    """The hooks that installed packages define; of more than one package where the name is not
    clear.
    """
    hooks: dict[str, tuple[Found, ...]] = {}
    for found in _entry_points():
        if found.group != KIT_HOOKS:
            continue
        if found.name.startswith("ds_") and found.name not in CORE_HOOKS:
            hooks[found.name] = (*hooks.get(found.name, ()), found)
        else:
            log.warning(
                "hook %s is left out: a name begins with ds_, and is none of the core's", found
            )
    return hooks


@functools.cache
def _entry_points() -> tuple[Found, ...]:
    _discovered_on()
    found = set()
    points = importlib_metadata.entry_points()
    for group in (SECTIONS, BACKENDS, KIT_HOOKS):
        for point in points.select(group=group):
            about = _header([point.dist])
            # Not `point.module`, which raises for a value that names no module: that is one
            # plugin's fault.
            module = point.value.partition("[")[0].strip()
            found.add(Found(point.name, group, module, about["Name"], about["Version"]))
    return tuple(sorted(found))


def _header(dists: Iterable[Any]) -> Message:
    """The metadata of the first, if any; importlib_metadata parses the README in it too, for each
    thing it is asked.
    """
    texts = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") for dist in dists)
    return message_from_string((next(texts, None) or "").partition("\n\n")[0])


def reset_discovery() -> None:
    """Forget what was discovered, if anything was installed or removed since."""
    importlib.invalidate_caches()
    if _discovered_on() != _import_path():
        _discovered_on.cache_clear()
        _entry_points.cache_clear()
        kit_hooks.cache_clear()
        unmet.cache_clear()


def _import_path() -> list[object]:
    """What is another after a distribution was installed or removed."""
    folders = map(os.path.abspath, sys.path)
    return [
        *sys.meta_path,
        *((path, os.path.isdir(path) and os.path.getmtime(path)) for path in folders),
    ]


_discovered_on = functools.cache(_import_path)


@functools.cache
def unmet(dist: str) -> str:
    """The first requirement of a distribution that is not met, in words; "" when all are, or none
    are known.
    """
    _discovered_on()
    for text in _header(importlib_metadata.distributions(name=dist)).get_all("Requires-Dist", ()):
        from packaging.requirements import InvalidRequirement
        from packaging.version import InvalidVersion

        try:
            if why := _lacking(text):
                return f"{dist} needs {text}, {why}"
        except (InvalidRequirement, InvalidVersion):  # nothing that can be compared
            continue
    return ""


def unmet_entries(requirements: Sequence[str]) -> Iterator[str]:
    """What is wrong with each entry of ``plugins.require`` that is not met."""
    from packaging.requirements import InvalidRequirement, Requirement

    from ds_core.catalogue import install

    for text in requirements:
        try:
            if why := _lacking(text):
                how = "" if "release" in why else f"; {install(Requirement(text).name)}"
                yield f"plugins.require: {text!r}, {why}{how}"
        except InvalidRequirement:
            yield f"plugins.require: {text!r} is not a requirement like 'dscore-zero>=0.1'"


def _lacking(requirement: str) -> str:
    """Why a requirement is not met, to go after it; "" when it is, or does not apply here."""
    from packaging.requirements import Requirement

    need = Requirement(requirement)
    if need.marker is not None and not need.marker.evaluate({"extra": ""}):
        return ""
    have = _header(importlib_metadata.distributions(name=need.name))["Version"]
    if have is None:
        return "which is not installed"
    if need.specifier.contains(have, prereleases=True):
        return ""
    newer = ">" in str(need.specifier)
    return f"but {need.name} {have} is installed; {'a newer' if newer else 'another'} release is needed"


def hooks_of(module: ModuleType | SimpleNamespace) -> tuple[str, ...]:
    """The hooks that a declaration module implements.

    Raises PluginError, to go after the plugin's name, for whatever would not work as a hook.
    """
    names = []
    for name, value in vars(module).items():
        if not name.startswith("ds_") or isinstance(value, ModuleType):
            continue
        if inspect.isfunction(value) or inspect.ismethod(value):
            if name in HOOKS:
                _check_function(name, value)
                names.append(name)
            else:
                _check_absent(name, value)
        elif name in HOOKS:
            raise PluginError(
                f"defines {name} as a {type(value).__name__}; a hook must be a plain function (def)"
            )
    if not any(name.startswith("ds_") for name in vars(module)):
        raise PluginError(f"defines no hook; known hooks: {', '.join(sorted(HOOKS))}")
    return tuple(names)


def _check_absent(name: str, function: Any) -> None:
    """A hook of a package that is not installed is never called; any other is an error."""
    from ds_core.catalogue import offered_by

    optional = (getattr(function, "ds_core_impl", None) or {}).get("optionalhook")
    if not optional and offered_by("hooks", name) is None:
        fix = did_you_mean(name, HOOKS, f"known hooks: {', '.join(sorted(HOOKS))}")
        raise PluginError(f"defines unknown hook {name!r}; {fix}")


def _check_function(name: str, function: Any) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(f"defines {name} with async def; hooks are plain functions (def)")
    if inspect.isgeneratorfunction(function) and HOOKS[name].ds_answer is nothing:
        raise PluginError(f"defines {name} with yield, so its body would never run")
    options = getattr(function, "ds_core_impl", None) or {}
    if options.get("wrapper") or options.get("hookwrapper"):
        raise PluginError(f"{name} is a wrapper; ds_core hooks are called one by one")
    for parameter in inspect.signature(function).parameters.values():
        open_ended = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if open_ended or (
            parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        ):
            offered = ", ".join(inspect.signature(HOOKS[name]).parameters) or "nothing"
            raise PluginError(
                f"defines {name} with {parameter}; a hook names the plain arguments it takes: "
                f"{offered}"
            )
