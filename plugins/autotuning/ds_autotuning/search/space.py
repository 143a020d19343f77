"""What may be tried: dimensions, from marks on the config models of all installed plugins and from
the user.

A plugin says on a field of its own section which values are worth a trial::

    schedule: str = option("auto", "...", json_schema_extra={"x-ds-tune": ["1f1b", "zero_bubble"]})

The mark is a list of values; or "divides_world", the divisors of the number of ranks; or a mapping
with the keys ``values`` (one of these two), ``needs`` (facts that the model's profile must have:
"pipeline", "experts", "transformers"; "given": the config has the section; "mapped": the key stands
in ``autotuning.arg_mappings``) and ``stages`` (of ZeRO).
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ds_autotuning.trials.launching import at
from ds_core.config.section import is_class, marks, names_of, old_names, union_members
from ds_core.errors import ConfigError, PluginError, Problem

TUNE = "x-ds-tune"
STAGE = "zero_optimization.stage"
MICRO = "train_micro_batch_size_per_gpu"
DIVIDES = "divides_world"

Setting = Mapping[str, Any]
"""Dotted key of the config -> its value."""


@dataclass(frozen=True)
class Mark:
    """A field that a plugin offers for tuning.

    names: every dotted spelling, the current first.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...] | str
    default: Any
    needs: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Dimension:
    """One key and its values.

    stages: of ZeRO in which it has an effect; (): all.

    implied: the first value is what the config has anyway, so that it need not be written.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    stages: tuple[int, ...] = ()
    implied: bool = False

    @property
    def key(self) -> str:
        """Its dotted key."""
        return self.names[0]


@dataclass(frozen=True)
class Space:
    """Every combination of the values of some dimensions."""

    dimensions: tuple[Dimension, ...]

    def __len__(self) -> int:
        size = 1
        for dimension in self.dimensions:
            size *= len(dimension.values)
        return size

    def base(self) -> dict[str, Any]:
        """The config as given: every first value."""
        return {d.key: d.values[0] for d in self.dimensions}

    def dimension(self, key: str) -> Dimension | None:
        """That of a key."""
        return next((d for d in self.dimensions if d.key == key), None)

    def settings(self) -> Iterator[dict[str, Any]]:
        """All of them: the config as given, then those that differ from it in one value, in two,
        and so on.
        """
        base = self.base()
        for count in range(len(self.dimensions) + 1):
            for chosen in itertools.combinations(self.dimensions, count):
                for values in itertools.product(*(d.values[1:] for d in chosen)):
                    yield {**base, **{d.key: v for d, v in zip(chosen, values, strict=True)}}

    def meaning(self, setting: Setting) -> dict[str, Any]:
        """`setting` with values that have no effect in its stage of ZeRO set to those of the config
        as given.
        """
        stage = setting.get(STAGE)
        idle = [
            d for d in self.dimensions if d.stages and stage is not None and stage not in d.stages
        ]
        return {**setting, **{d.key: d.values[0] for d in idle}}

    def where(self, **fixed: Any) -> Space:
        """Of it, the part in which keys (here with "__" for ".") have one value, as dimensions of
        one value.
        """
        values = {key.replace("__", "."): value for key, value in fixed.items()}
        return Space(
            tuple(
                Dimension(
                    d.names,
                    (values[d.key],),
                    d.stages,
                    _same(values[d.key], d.values[0]) and d.implied,
                )
                if d.key in values
                else d
                for d in self.dimensions
            )
        )


def key_of(setting: Setting) -> str:
    """The same text for equal settings."""
    return json.dumps(setting, sort_keys=True)


# -- marks -----------------------------------------------------------------------------------------


def marked(models: Mapping[str, tuple[type[BaseModel], str]]) -> list[Mark]:
    """What the sections of all plugins offer for tuning.

    Raises ConfigError for a mark that is none.
    """
    return [
        m
        for section, (model, owner) in sorted(models.items())
        for m in _marks_in(model, (section,), owner)
    ]


def installed_models(base: Mapping[str, Any] = {}) -> dict[str, tuple[type[BaseModel], str]]:
    """The model and owner of every section that a run with the config `base` may have.

    A plugin that is broken offers nothing here; `dscore doctor` tells of it.
    """
    from ds_core.config.build import plugin_settings
    from ds_core.config.source import ConfigSource
    from ds_core.plugins import Plugins

    plugins = Plugins(plugin_settings(ConfigSource(dict(base), "config")))
    models = {}
    for name in plugins.sections():
        try:
            models.update(plugins.models([name]))
        except PluginError:
            continue
    return models


def _marks_in(
    model: type[BaseModel], paths: tuple[str, ...], owner: str, depth: int = 4
) -> Iterator[Mark]:
    for name, field in model.model_fields.items():
        spellings = (*names_of(name, field), *old_names(field))
        names = tuple(f"{path}.{spelling}" for path in paths for spelling in spellings)
        if (mark := marks(field).get(TUNE)) is not None:
            yield _mark(mark, names, field.get_default(call_default_factory=True), owner)
        for inner in union_members(field.annotation):
            if depth and is_class(inner, BaseModel):
                yield from _marks_in(inner, names, owner, depth - 1)


def _mark(mark: Any, names: tuple[str, ...], default: Any, owner: str) -> Mark:
    given = mark if isinstance(mark, Mapping) else {"values": mark}
    values = given.get("values")
    if (values != DIVIDES and (not isinstance(values, Sequence) or isinstance(values, str))) or set(
        given
    ) - _KEYS:
        why = (
            f"{owner} marks it with {TUNE} {mark!r}, which is no list of values, {DIVIDES!r} or "
            f"mapping of {_KEYS}"
        )
        raise ConfigError([Problem(names[0], why)])
    needs = given.get("needs", ())
    return Mark(
        names,
        values if isinstance(values, str) else tuple(values),
        default.model_dump() if isinstance(default, BaseModel) else default,
        (needs,) if isinstance(needs, str) else tuple(needs),
        tuple(given.get("stages", ())),
    )


_KEYS = {"values", "needs", "stages"}


# -- the space of one run --------------------------------------------------------------------------


def space_of(
    found: Iterable[Mark],
    base: Mapping[str, Any],
    *,
    world: int,
    facts: Mapping[str, Any],
    fast: bool,
    own: Mapping[str, Sequence[Any]],
    mapped: Iterable[str] = (),
) -> Space:
    """The dimensions of a run, without the micro-batch size, whose values are found while it is
    tuned.

    base: the config as given.
    facts: of the model's profile.
    own: the user's dimensions (``autotuning.space``).
    mapped: keys of ``autotuning.arg_mappings``.
    """
    dimensions: dict[str, Dimension] = {}
    known: dict[str, Mark] = {}
    for mark in found:
        known[mark.names[0]] = mark
        if (fast and mark.names[0] != STAGE) or mark.names[0] in own:
            continue
        has = {name for name in ("pipeline", "experts", "transformers") if facts.get(name)}
        has |= {"mapped"} if mark.names[0] in set(mapped) else set()
        has |= {"given"} if mark.names[0].partition(".")[0] in base else set()
        if has.issuperset(mark.needs):
            dimension = Dimension(
                mark.names, _with_given(mark, base, world), mark.stages, implied=True
            )
            if len(dimension.values) > 1:
                dimensions[dimension.key] = dimension
    for key, values in own.items():
        if key != MICRO and values:
            there = known.get(key)
            dimensions[key] = Dimension(
                there.names if there else (key,), tuple(values), there.stages if there else ()
            )
    return Space(tuple(dimensions.values()))


def _with_given(mark: Mark, base: Mapping[str, Any], world: int) -> tuple[Any, ...]:
    """Its values, after the one that the config gives, or the default."""
    given = next(
        (v for v in (at(base, name) for name in mark.names) if v not in (None, "auto")),
        mark.default,
    )
    values: Iterable[Any] = mark.values
    if isinstance(mark.values, str):
        # Nothing said is an axis of size 1.
        low = 2 if given in (None, 0, 1, "auto") else 1
        values = (n for n in range(low, world + 1) if world % n == 0)
    return (given, *(v for v in values if not _same(v, given)))


def _same(a: Any, b: Any) -> bool:
    return key_of({"": a}) == key_of({"": b})


# -- settings and configs --------------------------------------------------------------------------


def merged(base: Mapping[str, Any], setting: Setting, space: Space) -> dict[str, Any]:
    """The config with `setting` in it. A value that is what the config has anyway is not written.

    Raises ConfigError where a key leads through something that is no section.
    """
    config = copy.deepcopy(dict(base))
    for key, value in setting.items():
        dimension = space.dimension(key)
        names = dimension.names if dimension else (key,)
        given = next((name for name in names if at(base, name) is not None), None)
        if (
            given is None
            and dimension is not None
            and dimension.implied
            and _same(value, dimension.values[0])
        ):
            continue
        _write(config, given or key, value)
    return config


def _write(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for depth, part in enumerate(path):
        inner = config.setdefault(part, {})
        if inner is None:
            inner = config[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                [
                    Problem(
                        ".".join(path[: depth + 1]),
                        f"is {inner!r}, no section, so {key} cannot be set",
                    )
                ]
            )
        config = inner
    config[last] = copy.deepcopy(value)


def changes(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The top-level keys of `config` that differ from `base`."""
    return {
        key: value
        for key, value in config.items()
        if key not in base or not _same(base[key], value)
    }
