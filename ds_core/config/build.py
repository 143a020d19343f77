"""Raw data + the models of the loaded sections -> one `RunConfig`, or one error that names every
problem.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pydantic import BaseModel, ValidationError

from ds_core.config.core import CORE_KEYS, CoreConfig, PluginsConfig, cross_problems
from ds_core.config.section import PER_RANK, WITHOUT_EFFECT, Section, marks, names_of, old_names
from ds_core.config.source import ConfigSource, read_config
from ds_core.errors import ConfigError, PluginError, Problem, join
from ds_core.naming import CORE

if TYPE_CHECKING:
    from ds_core.plugins import Plugins, PluginSettings

M = TypeVar("M", bound=BaseModel)

Models = Mapping[str, tuple[type[BaseModel], str]]
"""Section name -> its model and its owner ("acme-ds 0.1.0")."""


@dataclass(frozen=True, slots=True, repr=False)
class RunConfig:
    """A checked config, handed to everything that runs."""

    # The core's keys.
    core: CoreConfig
    # The plugins' sections that the config names.
    sections: Mapping[str, BaseModel]
    # Where it came from.
    origin: str
    # The data as given; it may hold secrets, so show `redacted()` instead.
    raw: dict[str, Any]
    # See `notes_on`.
    notes: tuple[Problem, ...] = ()
    # The path of every "auto" that is still to be filled in (only with `fill_later`, see
    # `load_config`).
    autos: tuple[str, ...] = ()

    @overload
    def section(self, which: type[M], /) -> M | None: ...

    @overload
    def section(self, which: str, /) -> BaseModel | None: ...

    def section(self, which: type[M] | str, /) -> BaseModel | None:
        """The parsed section of that model, which is how a plugin asks for its own; None when the
        config has none.

        By its name, for programs that look at a config.
        """
        if isinstance(which, str):
            return self.sections.get(which)
        return next(
            (section for section in self.sections.values() if isinstance(section, which)), None
        )

    def has(self, trait: str) -> bool:
        """Whether a section says that of the run (`Section.traits`): how a plugin asks about what
        others do.
        """
        sections = (section for section in self.sections.values() if isinstance(section, Section))
        return any(trait in section.traits() for section in sections)

    def redacted(self) -> dict[str, Any]:
        """The config as given with every secret replaced by ``***``: fit for logs and
        checkpoints."""
        from ds_core.config.redaction import redact

        shown: dict[str, Any] = redact(self.raw, self._marked_secret())
        return shown

    def fingerprint_items(self) -> dict[str, str]:
        """Dotted key -> canonical JSON of its value, secrets as hashes; equal on two ranks if the
        configs are.

        Without the keys that are marked as a rank's own.
        """
        from ds_core.config.keys import iter_keys
        from ds_core.config.redaction import redact

        keys = (
            key for name, section in self.sections.items() for key in iter_keys(type(section), name)
        )
        own = {key.path for key in keys if PER_RANK in marks(key.field)}
        items = _flat(redact(self.raw, self._marked_secret(), hide=_digest), "")
        return dict(sorted(item for item in items if item[0] not in own))

    def _marked_secret(self) -> frozenset[str]:
        from ds_core.config.keys import secret_names

        return secret_names([type(self.core), *map(type, self.sections.values())])

    def __repr__(self) -> str:
        return (
            f"RunConfig(origin={self.origin!r}, sections: "
            f"{', '.join(sorted(self.sections)) or 'none'})"
        )


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, join(path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _flat(item, join(path, index))
    else:  # 5e8 and 500000000 are one number
        yield (
            path,
            json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value),
        )


def _digest(value: Any) -> str:
    import hashlib

    text = json.dumps(dict(_flat(value, "")), sort_keys=True)
    return f"hidden:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def load_config(
    source: Any,
    *,
    fill_later: bool = False,
    problems: list[Problem] | None = None,
    given: Iterable[object] = (),
) -> tuple[Plugins, RunConfig]:
    """Load the plugins that a config, with DS_CONFIG_OVERRIDES, names, and check it.

    source: see `read_config`.
    fill_later: keys that say "auto" count as left out, because an integration will fill them in
        before training.
    problems: see `build_config`.
    given: modules and objects that take part, besides what the config names.

    Raises ConfigError with every problem, or PluginError when a named plugin is missing or broken.
    """
    from ds_core.plugins import Plugins

    source = read_config(source, in_part=True).overridden()
    settings = plugin_settings(source)
    try:
        plugins = Plugins(settings, given=given)
    except PluginError as error:
        raise PluginError(f"{source.origin}: {error}") from error
    models = plugins.models(name for name in source.raw if name not in CORE_KEYS)
    return plugins, build_config(
        source, models, plugins.sections(), plugins.disabled(), fill_later, problems
    )


def check_rules(
    config: RunConfig,
    plugins: Plugins,
    *,
    newer_than: frozenset[str] = frozenset(),
    more: Iterable[Problem] = (),
) -> None:
    """Ask `ds_check` of all that take part, until no new plugin does.

    A rule may itself choose what another plugin offers, which then takes part too.

    newer_than: who has been asked already.
    more: problems that were found before.

    Raises ConfigError with them all.
    """
    problems: list[Problem] = []
    while new := plugins.members() - newer_than:
        # A rule that chooses, for example, a state store joins the plugin that offers it.
        for answer in plugins.ask(
            "ds_check", newer_than=newer_than, config=config, plugins=plugins
        ):
            problems += answer.value
        newer_than |= new
    refuse([*problems, *more], config)


def plugin_settings(source: ConfigSource) -> PluginSettings:
    """The ``plugins`` key alone, read before the rest: it decides what is loaded.

    Nothing is where it is wrong, which `build_config` says.
    """
    from ds_core.plugins.registry import PluginSettings

    parsed = _parsed(PluginsConfig, source.raw.get("plugins", {}), "plugins", CORE, {}, [])
    return PluginSettings(**dict(parsed or ()))


def build_config(
    source: Any,
    models: Models,
    installed: Collection[str] = (),
    disabled: Mapping[str, str] = {},
    later: bool = False,
    problems: list[Problem] | None = None,
) -> RunConfig:
    """Check everything and build the frozen config.

    source: a `ConfigSource`, or anything `read_config` takes.
    models: of the loaded sections.
    installed: section names that enabled plugins claim (for suggestions).
    disabled: section -> why it is off.
    later: see `load_config`.
    problems: gets what is wrong, which the config is then without, instead of an error.

    Raises ConfigError with every problem of the core and of all sections, one for each key.
    """
    source = read_config(source, in_part=True)
    found = [*source.problems]
    # An "auto" that no integration has filled in is one problem, wherever in the config it is.
    autos = _leftover_autos(source.raw, models)
    # an "auto" takes its list with it
    lists = {path.rpartition("[")[0] for path in autos if path.endswith("]")}
    given = _without(source.raw, "", lists.union(autos)) if later else source.raw
    own = {name: value for name, value in given.items() if name in CORE_KEYS}
    core = _parsed(CoreConfig, own, "", CORE, models, found)
    sections: dict[str, BaseModel] = {}
    for name, value in given.items():
        if name in CORE_KEYS:
            continue
        if name in models:
            sections[name] = _parsed(models[name][0], value, name, models[name][1], models, found)
        else:
            from ds_core.config.unknown import without_model

            found += without_model(name, value, models, installed, disabled)
    if core is not None:
        found += cross_problems(core, given)
    else:  # what is chosen by name can be checked all the same
        own = {name: own[name] for name in ("optimizer", "scheduler") if name in own}
        core = _parsed(CoreConfig, own, "", CORE, models, []) or CoreConfig()
    if autos and not later:
        fix = "write a value, or leave the key out for its default"
        found = [
            Problem(", ".join(autos), _AUTO, fix),
            *(p for p in found if p.path not in autos),
        ]
    notes = [*notes_on(core, own)]
    for name, section in sections.items():
        notes += notes_on(section, given[name], name)
    config = RunConfig(core, sections, source.origin, source.raw, tuple(notes), tuple(autos))
    if problems is None:
        refuse(found, config)
    else:
        problems += found
    return config


def refuse(problems: Iterable[Problem], config: RunConfig) -> None:
    """Raises ConfigError with the problems, if there are any: one for each key."""
    first: dict[str, Problem] = {}
    for problem in problems:  # the first word on a key is the most exact one
        first.setdefault(problem.path, problem)
    if first:
        raise ConfigError(first.values(), config.origin)


def _parsed(
    model: type[BaseModel],
    value: Any,
    path: str,
    owner: str,
    models: Models,
    problems: list[Problem],
) -> Any:
    """The parsed section; None where something is wrong, which is added to `problems`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        from ds_core.config.translate import translate_errors
        from ds_core.config.unknown import places

        problems += translate_errors(
            error, model, path, owner=owner, data=value, elsewhere=places(models)
        )
    except Exception as error:  # a validator of a plugin that raises what pydantic does not catch
        from ds_core.config.keys import secret_names
        from ds_core.config.redaction import scrub, secrets_in

        text = scrub(str(error), secrets_in(value, secret_names([model])))
        problems.append(
            Problem(path, f"{owner} failed to check this section: {type(error).__name__}: {text}")
        )
    return None


# -- "auto" that was not filled in -----------------------------------------------------------------

_AUTO = (
    '"auto" was not filled in; an integration such as the Hugging Face Trainer or Accelerate '
    "does that beforehand"
)


def _leftover_autos(raw: dict[str, Any], models: Models) -> list[str]:
    """The path of every "auto" that stands under no key that accepts it."""
    known = {name: value for name, value in raw.items() if name in CORE_KEYS or name in models}
    found = [path for path, text in _flat(known, "") if text == '"auto"']
    if found:
        from ds_core.config.keys import names_taking_auto

        taking = names_taking_auto({name: model for name, (model, _) in models.items()})
        found = [path for path in found if taking.isdisjoint(path.replace("[", ".").split("."))]
    return found


def _without(value: Any, path: str, autos: Collection[str]) -> Any:
    """`value` without the keys whose paths are in `autos`."""
    if isinstance(value, list):
        return [_without(item, join(path, index), autos) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            k: _without(v, join(path, k), autos)
            for k, v in value.items()
            if join(path, k) not in autos
        }
    return value


# -- notes -----------------------------------------------------------------------------------------


def notes_on(parsed: Any, given: Any, path: str = "") -> Iterator[Problem]:
    """What a config says that is accepted and has no effect, or has another name now: logged once,
    never refused.

    A key that is accepted without effect by design is marked where it is declared, ``option(False,
    "...", without_effect="they always are")``: a note on every value but the default. What depends
    on other keys of the section is said by its `remarks`. Paths start with `path`, keys are as they
    were written in `given`.
    """
    if isinstance(parsed, (list, tuple)) and isinstance(given, (list, tuple)):
        for index, (item, value) in enumerate(zip(parsed, given, strict=False)):
            yield from notes_on(item, value, join(path, index))
    elif isinstance(parsed, Mapping) and isinstance(given, Mapping):
        for key, item in parsed.items():
            yield from notes_on(item, given.get(key), join(path, key))
    elif isinstance(parsed, BaseModel):
        yield from _on_fields(parsed, given if isinstance(given, Mapping) else {}, path)
        for key, said in parsed.remarks(given) if isinstance(parsed, Section) else ():
            yield Problem(join(path, key) if key else path, said)


def _on_fields(parsed: BaseModel, raw: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, field in type(parsed).model_fields.items():
        old = old_names(field)
        used = next((n for n in (*names_of(name, field), *old) if n in raw), None)
        if used is None:
            continue
        where = join(path, used)
        value = getattr(parsed, name)
        if used in old:
            yield Problem(where, f"is deprecated and was read as {name!r}", "rename it")
        why = marks(field).get(WITHOUT_EFFECT)
        if why is None:
            yield from notes_on(value, raw[used], where)
        elif value != field.get_default(call_default_factory=True):
            yield Problem(where, f"has no effect: {why}")
