"""The conformance kit for plugins: subclass `PluginConformance`, name your declaration module, and
run pytest.

It checks what ds_core relies on: a declaration that costs nothing to import, hooks that fit, a
strict and described config section, and references that lead somewhere.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, get_args

import pytest
from pydantic import BaseModel, RootModel, ValidationError
from pydantic_core import to_jsonable_python

from ds_core import entries as offered
from ds_core.catalogue import offered_by
from ds_core.config.section import is_class
from ds_core.entries import resolve
from ds_core.errors import ConfigError
from ds_core.plugins import Plugins, old_forms
from ds_core.plugins.discovery import HOOKS, PluginState, Report, discover
from ds_core.plugins.registry import PluginSettings

HEAVY = (
    "torch",
    "numpy",
    "triton",
    "transformers",
    "pandas",
    "tensorboard",
    "wandb",
    "comet_ml",
    "typer",
    "rich",
)
"""Packages that a declaration module may not pull in; what needs them is named by reference."""

WITHOUT_ARGUMENTS = (
    "ds_config",
    "ds_accelerators",
    "ds_kernels",
    "ds_optimizers",
    "ds_schedulers",
    "ds_launchers",
    "ds_commands",
    "ds_state_stores",
)
REFERENCES = ("load", "params", "probe", "available")

_PROBER = """
import importlib, json, os, sys, threading, traceback
sys.path[:] = json.loads(sys.argv[1])
from ds_core import hookspecs, entries, plugins
import pydantic

def probe(module, out, err):
    for number, file in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(file, os.O_RDWR), number)
    before, here = dict(os.environ), os.getcwd()
    importlib.import_module(module)
    print("\\0" + json.dumps({
        "modules": sorted(sys.modules),
        "environment": sorted(k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)),
        "moved": os.getcwd() != here,
        "threads": threading.active_count() - 1,
    }), flush=True)

for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            probe(*json.loads(line))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Reads ``[module, file for stdout, file for stderr]`` a line, and imports each module in a fork."""


class PluginConformance:
    """Tests of any plugin: inherit, and set `entry_point`.

    With a config section also set `section`, `good_config` and `bad_configs`.

    ``class TestMine(PluginConformance)``: the name must start with Test, so that pytest collects
    it.
    """

    entry_point: ClassVar[str]
    """The declaration module, as in the value of the entry point: ``"their.plugin"``."""
    section: ClassVar[str | None] = None
    """The config section that the plugin owns; None for a plugin without ``ds_config``."""
    good_config: ClassVar[Any] = None
    """A value of the section that must validate."""
    bad_configs: ClassVar[Sequence[Any]] = ()
    """Values of the section that must be refused."""

    # -- the declaration module --------------------------------------------------------------------

    def test_imports_nothing_heavy(self) -> None:
        """Importing the declaration loads no torch and no other heavy package."""
        heavy = sorted(set(_imported_alone(self.entry_point)["modules"]) & set(HEAVY))
        assert not heavy, (
            f"{self.entry_point} imports {heavy}; name what needs them by a reference "
            "'module:attribute'"
        )

    def test_import_changes_nothing(self) -> None:
        """Importing the declaration prints nothing, starts no thread, keeps the environment and the
        directory.
        """
        seen = _imported_alone(self.entry_point)
        assert seen["printed"] == "", f"{self.entry_point} prints at import: {seen['printed']!r}"
        assert not seen["environment"], (
            f"{self.entry_point} changes the environment variables {seen['environment']}"
        )
        assert not seen["moved"], f"{self.entry_point} changes the working directory"
        assert seen["threads"] == 0, (
            f"{self.entry_point} starts {seen['threads']} threads at import"
        )

    def test_imports_no_other_plugin(self) -> None:
        """The declaration does not import another installed plugin: plugins know the core only."""
        own = _top(self.entry_point)
        others = {_top(found.module) for found in discover()} - {own, "ds_core"}
        seen = sorted(
            others & {_top(name) for name in _imported_alone(self.entry_point)["modules"]}
        )
        assert not seen, (
            f"{self.entry_point} imports the plugins {seen}; ask ds_core by capability instead"
        )

    def test_loads_by_name(self) -> None:
        """``{"plugins": {"load": [...]}}`` loads and registers it."""
        assert self.report().state is PluginState.LOADED

    # -- hooks -------------------------------------------------------------------------------------

    def test_every_hook_is_known_and_fits(self) -> None:
        """Every function named ``ds_*`` is a hook and takes only arguments that the hook offers.

        One in the form of an earlier contract works on, and a DeprecationWarning says what to write
        instead.
        """
        module = old_forms.adapted(resolve(self.entry_point))
        names = [
            n for n in vars(module) if n.startswith("ds_") and inspect.isroutine(getattr(module, n))
        ]
        assert names, f"{self.entry_point} implements no hook; define at least one function ds_*"
        for name in names:
            spec = HOOKS.get(name)
            if spec is None and offered_by("hooks", name) is not None:
                continue  # of a package that is not installed
            assert spec is not None, (
                f"{self.entry_point}.{name} is no hook of ds_core or of an installed package"
            )
            offered = inspect.signature(spec).parameters
            for parameter in inspect.signature(getattr(module, name)).parameters.values():
                plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                assert plain, f"{name}: {parameter} is not a plain argument"
                assert parameter.name in offered, (
                    f"{name} takes {parameter.name!r}; the hook offers {list(offered)}"
                )

    def test_hooks_answer_twice_the_same(self) -> None:
        """Hooks without arguments give equal answers when asked again (no generator that runs
        dry)."""
        for name in self.hooks():
            first = _comparable(self.ask(name))
            second = _comparable(self.ask(name))
            assert first == second, f"{name} answered {first!r}, and then {second!r}"

    def test_names_do_not_collide(self) -> None:
        """Names are looked up without regard to case, so no two of one hook differ only in it."""
        for name in self.hooks():
            answer = self.ask(name)
            lowered = [key.lower() for key in answer] if isinstance(answer, Mapping) else []
            twice = sorted({key for key in lowered if lowered.count(key) > 1})
            assert not twice, (
                f"{name} offers {twice} more than once; names differ in more than case"
            )

    def test_references_resolve(self) -> None:
        """Every ``"module:attribute"`` of every entry leads to something callable, and every probe
        answers.

        What a probe says cannot be used here need not import, but its module must exist.
        """
        for where, entry in self.entries():
            reason = _reason(where, entry)
            for name in REFERENCES:
                reference = getattr(entry, name, None)
                if not isinstance(reference, str):
                    continue
                assert ":" in reference, (
                    f"{where}.{name} is {reference!r}; write 'package.module:attribute'"
                )
                if reason is not None and name in ("load", "params"):
                    assert _exists(reference.partition(":")[0]), (
                        f"{where}.{name}: no module for {reference!r}"
                    )
                    continue
                assert callable(resolve(reference)), (
                    f"{where}.{name}: {reference!r} is not callable"
                )

    def test_entries_are_well_formed(self) -> None:
        """Fields of entries hold what the core looks for: names, known dtypes, known grains, strict
        params models.
        """
        import torch

        for where, entry in self.entries():
            for name in ("name", "op", "provider", "device_type"):
                assert getattr(entry, name, "-"), f"{where}.{name} is empty"
            for dtype in getattr(entry, "dtypes", ()):
                known = isinstance(getattr(torch, dtype, None), torch.dtype)
                assert known, f"{where}.dtypes holds {dtype!r}; write torch's name without 'torch.'"
            grain = getattr(entry, "grain", "element")
            assert grain in get_args(offered.Grain), f"{where}.grain is {grain!r}"
            if _reason(where, entry) is None and getattr(entry, "params", None) is not None:
                _check_model(resolve(entry.params), f"{where}.params")

    # -- the section -------------------------------------------------------------------------------

    def test_section_and_model_belong_together(self) -> None:
        """A plugin with ``ds_config`` says here which section it owns and gives a good config;
        others give none.
        """
        if "ds_config" in self.hooks():
            assert self.section, (
                f"{self.entry_point} implements ds_config; set `section` in {type(self).__name__}"
            )
            assert self.good_config is not None, (
                f"set `good_config` in {type(self).__name__}: section {self.section!r}"
            )
        else:
            assert self.section is None, (
                f"{self.entry_point} has no ds_config, but section is {self.section!r}"
            )
            assert self.good_config is None and not self.bad_configs, (
                "configs are given, but there is no ds_config"
            )

    def test_model_is_strict_and_described(self) -> None:
        """The section's model forbids extra keys and describes every field, in nested models too;
        defaults are JSON.
        """
        for model in self.models():
            _check_model(model, self.entry_point)
            json.dumps(model.model_json_schema())

    def test_good_config_validates(self) -> None:
        """`good_config` validates, and what it dumps to validates to the same again."""
        for model in self.models():
            parsed = model.model_validate(self.good_config)
            dumped = json.loads(parsed.model_dump_json(by_alias=True))
            again = json.loads(model.model_validate(dumped).model_dump_json(by_alias=True))
            assert again == dumped, (
                f"{model.__name__} dumps to {dumped!r}, which validates to {again!r}"
            )

    def test_unknown_key_is_refused(self) -> None:
        """A misspelt key in the section is an error, never ignored."""
        for model in self.models():
            if isinstance(self.good_config, Mapping):
                with pytest.raises((ValidationError, ConfigError)):
                    model.model_validate({**self.good_config, "no_such_key_in_any_section": 1})
            else:
                is_root = issubclass(model, RootModel)
                assert is_root, (
                    f"good_config is {self.good_config!r}, but {model.__name__} has keys"
                )

    def test_bad_configs_are_refused(self) -> None:
        """Each of `bad_configs` raises a validation error, and not any other."""
        for model in self.models():
            for bad in self.bad_configs:
                try:
                    parsed = model.model_validate(bad)
                except (ValidationError, ConfigError):
                    continue
                pytest.fail(f"{model.__name__} accepts the bad config {bad!r} as {parsed!r}")

    # -- helpers, for subclasses' own tests as well ------------------------------------------------

    def plugins(self) -> Plugins:
        """A `Plugins` of the core and this plugin alone."""
        load = f"{self.section}={self.entry_point}" if self.section else self.entry_point
        return Plugins(PluginSettings(load=[load]), found=())

    def report(self) -> Report:
        """The row of this plugin in ``dscore plugins``."""
        return next(r for r in self.plugins().reports() if r.found.module == self.entry_point)

    def hooks(self) -> list[str]:
        """The implemented hooks that take no arguments, in a fixed order."""
        module = resolve(self.entry_point)
        return [
            name for name in WITHOUT_ARGUMENTS if inspect.isroutine(getattr(module, name, None))
        ]

    def ask(self, hook: str) -> Any:
        """This plugin's answer to a hook without arguments; iterables as a list, mappings as a
        dict.
        """
        plugins = self.plugins()
        found = next(r.found for r in plugins.reports() if r.found.module == self.entry_point)
        answer = plugins.ask_one(hook, found)
        if hook == "ds_config":
            return answer
        return dict(answer) if isinstance(answer, Mapping) else list(answer)

    def models(self) -> list[type[BaseModel]]:
        """The section's model, or nothing."""
        if "ds_config" not in self.hooks():
            return []
        answer = self.ask("ds_config")
        return [answer[self.section] if isinstance(answer, Mapping) else answer]

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Every entry of every by-name hook, with where it stands."""
        for hook in self.hooks():
            if hook == "ds_config":
                continue
            answer = self.ask(hook)
            rows = answer.items() if isinstance(answer, dict) else enumerate(answer)
            for key, entry in rows:
                assert is_dataclass(entry), (
                    f"{hook}[{key!r}] is {entry!r}, not an entry of ds_core.entries"
                )
                yield f"{hook}[{key!r}]", entry


@functools.cache
def _imported_alone(module: str) -> dict[str, Any]:
    """What importing `module` did in a process that has only ds_core's torch-free modules."""
    prober = _prober(json.dumps([os.path.abspath(entry) for entry in sys.path]))
    with (
        tempfile.NamedTemporaryFile("r", prefix="ds-probe-") as out,
        tempfile.NamedTemporaryFile("r", prefix="ds-probe-") as err,
    ):
        assert prober.stdin is not None and prober.stdout is not None
        prober.stdin.write(json.dumps([module, out.name, err.name]) + "\n")
        prober.stdin.flush()
        status = prober.stdout.readline().strip()
        assert status == "0", f"{module} cannot be imported on its own:\n{err.read()}"
        printed, _, report = out.read().rpartition("\0")
    found: dict[str, Any] = json.loads(report)
    return found | {"printed": printed}


@functools.cache
def _prober(path: str) -> subprocess.Popen[str]:
    """A process that imports modules in forks of itself: an interpreter for each would cost more
    than what it imports.
    """
    started = subprocess.Popen(
        [sys.executable, "-c", _PROBER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # It ends when its input does; leaving the context closes that and waits.
    atexit.register(started.__exit__, None, None, None)
    return started


def _comparable(answer: Any) -> Any:
    """`answer` with functions written by name: a probe given as a lambda is a new object each
    time."""
    if isinstance(answer, dict):
        return {key: _comparable(entry) for key, entry in answer.items()}
    # the model may be created on each call
    if isinstance(answer, type) and issubclass(answer, BaseModel):
        return answer.__name__, answer.model_json_schema()
    if isinstance(answer, list):
        return [_comparable(entry) for entry in answer]
    if is_dataclass(answer) and not isinstance(answer, type):
        values = {field.name: getattr(answer, field.name) for field in fields(answer)}
        return type(answer), {
            k: getattr(v, "__qualname__", v) if callable(v) else v for k, v in values.items()
        }
    return answer


def _top(module: str) -> str:
    return module.partition(".")[0]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _reason(where: str, entry: Any) -> str | None:
    """Why the entry cannot be used on this machine; asked twice, since a probe must not change what
    it asks about.
    """
    for name in ("probe", "available"):
        probe = getattr(entry, name, None)
        first = offered.ask(probe)
        second = offered.ask(probe)
        assert first != "", f"{where}.{name} answers '', not a reason"
        assert "neither None nor a reason" not in (first or ""), f"{where}.{name}: {first}"
        assert first == second, f"{where}.{name} answered {first!r}, and then {second!r}"
        if first is not None:
            return first
    return None


def _check_model(model: Any, where: str, seen: frozenset[type] = frozenset()) -> None:
    """Assert that `model` and the models inside it are strict, described and have JSON defaults."""
    assert isinstance(model, type) and issubclass(model, BaseModel), (
        f"{where}: {model!r} is not a pydantic model class"
    )
    where = f"{where}: {model.__name__}"
    is_root = issubclass(model, RootModel)
    if not is_root:
        extra = model.model_config.get("extra")
        assert extra == "forbid", (
            f"{where} has extra={extra!r}; inherit ds_core.config.Section or set extra='forbid'"
        )
    for name, field in model.model_fields.items():
        described = field.description or (model.__doc__ if is_root else None)
        assert described, f"{where}.{name} has no description; give it with Field(description=...)"
        if not field.is_required() and not getattr(
            field, "default_factory_takes_validated_data", False
        ):
            default = field.get_default(call_default_factory=True)
            try:
                json.dumps(to_jsonable_python(default), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise AssertionError(
                    f"{where}.{name}: the default {default!r} is not JSON: {error}"
                ) from error
        for inner in _models_in(field.annotation):
            if inner is not model and inner not in seen:
                _check_model(inner, f"{where}.{name}", seen | {model})


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if is_class(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
