"""Raw data + the models of the loaded sections -> one `RunConfig`, or one error that names every problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ds_core.catalogue import documented, install, offered_by
from ds_core.config.core import CORE_KEYS, CoreConfig, PluginsConfig
from ds_core.config.documented import is_off, misspelt_keys
from ds_core.config.keys import Place, bare, iter_keys, reach
from ds_core.config.notes import notes_on
from ds_core.config.paths import join, path_text
from ds_core.config.redaction import scrub
from ds_core.config.rules import cross_problems
from ds_core.config.run import RunConfig
from ds_core.config.section import union_members
from ds_core.config.source import ConfigSource, read_config
from ds_core.config.translate import auto_problem, join_autos, secret_strings, show_unknown, translate_errors
from ds_core.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from ds_core.plugins import PluginSettings

__all__ = ["CORE_OWNER", "Models", "build_config", "plugin_settings"]

CORE_OWNER = "ds-core"

Models = Mapping[str, tuple[type[BaseModel], str]]
"""Section name -> its model and its owner ("ds-zero 0.1.0")."""


def plugin_settings(source: ConfigSource) -> PluginSettings:
    """The ``plugins`` key alone, checked: it decides what is loaded before the rest can be read.

    Raises ConfigError when that key is wrong.
    """
    from ds_core.plugins import PluginSettings

    given = source.raw.get("plugins", {})
    try:
        parsed = PluginsConfig.model_validate(given)
    except ValidationError as error:
        problems = translate_errors(error, PluginsConfig, "plugins", owner=CORE_OWNER, data=given)
        raise ConfigError(problems, source.origin) from None
    return PluginSettings(tuple(parsed.require), tuple(parsed.disable), tuple(parsed.load), dict(parsed.prefer))


def build_config(
    source: Any, models: Models, installed: Iterable[str] = (), disabled: Mapping[str, str] | None = None
) -> RunConfig:
    """Check everything and build the frozen config.

    source: a `ConfigSource`, or anything `read_config` takes. models: of the loaded sections.
    installed: section names that enabled plugins claim (for suggestions). disabled: section -> why it is off.
    Raises ConfigError with every problem of the core and of all sections.
    """
    source = read_config(source)
    builder = _Builder(source.raw, models, frozenset(installed), disabled or {})
    core, sections, problems = builder.build()
    if problems or core is None:
        raise ConfigError(problems, source.origin)
    notes = [*notes_on(core, source.raw)]
    for name, section in sections.items():
        notes += notes_on(section, source.raw[name], name)
    return RunConfig(core, sections, source.origin, source.raw, tuple(notes))


class _Builder:
    """One pass over the raw data; collects problems in the order of the file."""

    def __init__(
        self, raw: dict[str, Any], models: Models, installed: frozenset[str], disabled: Mapping[str, str]
    ) -> None:
        self.raw, self.models, self.installed, self.disabled = raw, models, installed, disabled
        self.problems: list[Problem] = []

    def build(self) -> tuple[CoreConfig | None, dict[str, BaseModel], list[Problem]]:
        own = {k: v for k, v in self.raw.items() if k in CORE_KEYS}
        core = self._parse(CoreConfig, own, "", CORE_OWNER)
        sections = {}
        for name, value in self.raw.items():
            if name in CORE_KEYS:
                continue
            if name not in self.models:
                self.problems += self._without_model(name, value)
                continue
            model, owner = self.models[name]
            parsed = self._parse(model, value, name, owner)
            if parsed is not None:
                sections[name] = parsed
        self.problems += cross_problems(self.raw)
        return core, sections, self._unique()

    def _parse(self, model: type[Any], value: Any, path: str, owner: str) -> Any:
        """The parsed section; None with problems noted."""
        autos = list(_leftover_autos(model, value, path))
        self.problems += autos
        try:
            return model.model_validate(value)
        except ValidationError as error:
            self.problems += translate_errors(
                error, model, path, owner=owner, data=value, elsewhere=_Elsewhere(self.models)
            )
        except RecursionError:
            self.problems.append(Problem(path, "is nested too deeply"))
        except Exception as error:  # a validator of a plugin that raises what pydantic does not catch
            text = scrub(str(error), secret_strings(value, model))
            self.problems.append(Problem(path, f"{owner} failed to check this section: {type(error).__name__}: {text}"))
        return None

    def _without_model(self, name: str, value: Any) -> list[Problem]:
        """What to say of a key that is neither the core's nor a loaded section."""
        if name in self.disabled:
            why = f"the plugin that owns this section is disabled: {self.disabled[name]}"
            return [Problem(name, why, "enable it, or remove the section")]
        if name in documented():
            if not is_off(name, value):
                return [_not_there(name)]
            return [*misspelt_keys(name, value)] if value else []
        if name in self.installed:
            why = "the plugin that claims this section gives no model for it (ds_config)"
            return [Problem(name, why, "repair or uninstall the plugin")]
        return [self._unknown(name, value)]

    def _unknown(self, name: str, value: Any) -> Problem:
        message = f"unknown key {name!r} (its value is {show_unknown(name, value)})"
        inside = _Elsewhere(self.models).get(name)
        if inside:
            return Problem(name, message, f"{name!r} belongs at {inside!r}")
        close = nearest(name, {*CORE_KEYS, *self.models, *self.installed, *documented()})
        if close is None:
            return Problem(name, message, "no key of ds-core, of an installed plugin or of the documents is like it")
        return Problem(name, message, f"did you mean {close!r} ({self._owner(close)})?")

    def _owner(self, name: str) -> str:
        if name in CORE_KEYS:
            return CORE_OWNER
        if name in self.models:
            return self.models[name][1]
        if name in self.installed:
            return documented()[name]["owner"] if name in documented() else "an installed plugin"
        state = "not built yet" if offered_by("sections", name) is None else "not installed"
        return f"{documented()[name]['owner']}, {state}"

    def _unique(self) -> list[Problem]:
        found: dict[str, Problem] = {}
        for problem in self.problems:  # the first word on a key is the most exact one
            found.setdefault(problem.path, problem)
        return join_autos(found.values())


def _not_there(name: str) -> Problem:
    """The problem of a documented section whose plugin is not installed."""
    owner = documented()[name]["owner"]
    if offered_by("sections", name) is not None:
        why = f"this section is served by {owner}, which is not installed"
        return Problem(name, why, f"install it with {install(owner)}")
    why = f"this section is documented but not built yet (it will come with {owner})"
    return Problem(name, why, "remove it, or switch it off")


class _Elsewhere(Mapping[str, str]):
    """Key -> the one place where a key of this name is known; computed only when something is misplaced."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._found: dict[str, str] | None = None

    def _index(self) -> dict[str, str]:
        if self._found is None:
            places: dict[str, set[str]] = {}
            trees = [("", CoreConfig), *((n, m) for n, (m, _) in self._models.items())]
            for prefix, model in trees:
                for key in iter_keys(model, prefix, ""):
                    if "*" not in key.path and "[]" not in key.path:
                        places.setdefault(key.path.rpartition(".")[2], set()).add(key.path)
            for name in (*documented(), *self._models):
                places.setdefault(name, set()).add(name)
            self._found = {n: next(iter(p)) for n, p in places.items() if len(p) == 1}
        return self._found

    def __getitem__(self, name: str) -> str:
        return self._index()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index())

    def __len__(self) -> int:
        return len(self._index())


def _leftover_autos(model: type[BaseModel], value: Any, root: str) -> Iterator[Problem]:
    """Every "auto" that its field does not itself accept."""

    def walk(item: Any, keys: tuple[str | int, ...]) -> Iterator[Problem]:
        if item == "auto" and isinstance(item, str):
            if not any(map(_accepts_auto, reach(model, keys))):
                yield auto_problem(path_text(keys, root) or join("", root))
        elif isinstance(item, dict):
            for key, inner in item.items():
                yield from walk(inner, (*keys, key))
        elif isinstance(item, list):
            for index, inner in enumerate(item):
                yield from walk(inner, (*keys, index))

    yield from walk(value, ())


def _accepts_auto(place: Place) -> bool:
    if place.field is not None and place.field.get_default(call_default_factory=False) == "auto":
        return True
    return any(get_origin(m) is Literal and "auto" in get_args(m) for m in map(bare, union_members(bare(place.hint))))
