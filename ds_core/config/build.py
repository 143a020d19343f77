"""Raw data + the models of the loaded sections -> one `RunConfig`, or one error that names every problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ds_core.config.core import CORE_KEYS, CoreConfig, PluginsConfig, cross_problems
from ds_core.config.redaction import scrub
from ds_core.config.run import RunConfig
from ds_core.config.section import WITHOUT_EFFECT, Section, marks, names_of, old_names, union_members
from ds_core.config.source import ConfigSource, read_config
from ds_core.errors import ConfigError, Problem, join, nearest, path_text

if TYPE_CHECKING:
    from ds_core.config.keys import Place
    from ds_core.plugins import PluginSettings

__all__ = ["build_config", "CORE_OWNER", "Models", "notes_on", "plugin_settings"]

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
        from ds_core.config.translate import translate_errors

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
        self.problems += _leftover_autos(model, value, path)
        try:
            return model.model_validate(value)
        except ValidationError as error:
            from ds_core.config.translate import translate_errors

            self.problems += translate_errors(
                error, model, path, owner=owner, data=value, elsewhere=_Elsewhere(self.models)
            )
        except RecursionError:
            self.problems.append(Problem(path, "is nested too deeply"))
        except Exception as error:  # a validator of a plugin that raises what pydantic does not catch
            from ds_core.config.translate import secret_strings

            text = scrub(str(error), secret_strings(value, model))
            self.problems.append(Problem(path, f"{owner} failed to check this section: {type(error).__name__}: {text}"))
        return None

    def _without_model(self, name: str, value: Any) -> list[Problem]:
        """What to say of a key that is neither the core's nor a loaded section."""
        if name in self.disabled:
            why = f"the plugin that owns this section is disabled: {self.disabled[name]}"
            return [Problem(name, why, "enable it, or remove the section")]
        from ds_core.catalogue import documented, missing

        if name in documented():
            from ds_core.config.documented import is_off, misspelt_keys

            if is_off(name, value):
                return [*misspelt_keys(name, value)] if value else []
            off = "remove it, or switch it off"
            if (reason := documented()[name].get("why")) is not None:
                return [Problem(name, f"this key is documented but not offered: {reason}", off)]
            return [missing("sections", name, path=name, instead=off)]
        if name in self.installed:
            why = "the plugin that claims this section gives no model for it (ds_config)"
            return [Problem(name, why, "repair or uninstall the plugin")]
        return [self._unknown(name, value)]

    def _unknown(self, name: str, value: Any) -> Problem:
        from ds_core.catalogue import documented
        from ds_core.config.translate import show_unknown

        message = f"unknown key {name!r} (its value is {show_unknown(name, value)})"
        inside = _Elsewhere(self.models).get(name)
        if inside:
            return Problem(name, message, f"{name!r} belongs at {inside!r}")
        close = nearest(name, {*CORE_KEYS, *self.models, *self.installed, *documented()})
        if close is None:
            return Problem(name, message, "no key of ds-core, of an installed plugin or of the documents is like it")
        return Problem(name, message, f"did you mean {close!r} ({self._owner(close)})?")

    def _owner(self, name: str) -> str:
        from ds_core.catalogue import documented, offered_by

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
        if not found:
            return []
        from ds_core.config.translate import join_autos

        return join_autos(found.values())


class _Elsewhere(Mapping[str, str]):
    """Key -> the one place where a key of this name is known; computed only when something is misplaced."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._found: dict[str, str] | None = None

    def _index(self) -> dict[str, str]:
        if self._found is None:
            from ds_core.catalogue import documented
            from ds_core.config.keys import iter_keys

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
            from ds_core.config.keys import reach
            from ds_core.config.translate import auto_problem

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
    from ds_core.config.keys import bare

    if place.field is not None and place.field.get_default(call_default_factory=False) == "auto":
        return True
    return any(get_origin(m) is Literal and "auto" in get_args(m) for m in map(bare, union_members(bare(place.hint))))


# -- notes ------------------------------------------------------------------------------------------------------------


def notes_on(parsed: Any, given: Any, path: str = "") -> Iterator[Problem]:
    """What a config says that is accepted and has no effect, or has another name now: logged once, never refused.

    A key that is accepted without effect by design is marked where it is declared, ``option(False, "...",
    without_effect="they always are")``: a note on every value but the default. What depends on other keys of the
    section is said by its `remarks`. Paths start with `path`, keys are as they were written in `given`.
    """
    if isinstance(parsed, (list, tuple)) and isinstance(given, (list, tuple)):
        for index, (item, value) in enumerate(zip(parsed, given, strict=False)):
            yield from notes_on(item, value, join(path, index))
    elif isinstance(parsed, Mapping) and isinstance(given, Mapping):
        for key, item in parsed.items():
            yield from notes_on(item, given.get(key), join(path, key))
    elif isinstance(parsed, BaseModel):
        raw: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        yield from _on_fields(parsed, raw, path)
        for key, said in parsed.remarks(given) if isinstance(parsed, Section) else ():
            yield Problem(join(path, key) if key else path, said)


def _on_fields(parsed: BaseModel, raw: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, field in type(parsed).model_fields.items():
        old = old_names(field)
        used = next((n for n in (*names_of(name, field), *old) if n in raw), None)
        if used is None:
            continue
        where, value = join(path, used), getattr(parsed, name)
        if used in old:
            yield Problem(where, f"is deprecated and was read as {name!r}", "rename it")
        why = marks(field).get(WITHOUT_EFFECT)
        if why is None:
            yield from notes_on(value, raw[used], where)
        elif value != field.get_default(call_default_factory=True):
            yield Problem(where, f"has no effect: {why}")
