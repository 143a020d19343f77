"""What one key of the config means: for ``dscore config explain``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ds_core.catalogue import documented, install, offered_by
from ds_core.config.core import CoreConfig
from ds_core.config.keys import Key, bare, is_secret, iter_keys
from ds_core.config.redaction import REDACTED
from ds_core.config.section import NOT_OFFERED, WITHOUT_EFFECT, is_class, marks, names_of, old_names
from ds_core.config.translate import describe
from ds_core.config.unknown import places
from ds_core.errors import ConfigError, Problem, nearest


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is said of a key of the config."""

    path: str
    """Of the key."""
    owner: str
    """Distribution and version."""
    type: str
    """In words."""
    default: str
    """As JSON, or "required"."""
    description: str
    keys: tuple[tuple[str, str], ...] = ()
    """Of a section, its keys with what each does; of a key in the parameters of optimizers or
    schedules, the names that accept it with its type and default.
    """


Models = Mapping[str, tuple[type[BaseModel], str]]
Owned = tuple[Key, str]
"""A key and its owner."""


def explain(key: str, models: Models, named: Mapping[str, Models] | None = None) -> Explanation:
    """Explain a dotted path such as ``fp16.loss_scale`` or
    ``tensor_parallel.layer_specs[0].patterns``, or its end.

    models: section -> its model and owner.
    named: ``optimizer`` and ``scheduler`` -> name -> the model of the ``params`` under that name,
        and its owner.

    Raises ConfigError that names the nearest known key when there is none such.
    """
    if key in models:
        model, owner = models[key]
        return Explanation(key, owner, "an object {...}", "absent", _about(model), _keys_of(model))
    kind, _, param = key.partition(".params.")
    if param and named and kind in named:
        return _explain_param(key, param, named[kind])
    table: dict[str, Owned] = {}
    trees: list[tuple[str, type[BaseModel], str]] = [("", CoreConfig, "dscore-train")]
    trees += [(name, model, owner) for name, (model, owner) in models.items()]
    for prefix, model, owner in trees:
        for row in iter_keys(model, prefix):
            table.setdefault(row.path, (row, owner))
    found = table.get(re.sub(r"\[\d+\]", "[]", key)) or _open_key(key, table)
    if found is not None:
        return _explained(key, *found)
    if key.partition(".")[0] in documented() and key.partition(".")[0] not in models:
        return _documented(key)
    ends = [path for path in table if path.endswith(f".{key}")]
    tops = [
        n for n in {**models, **table, **documented()} if n.startswith(f"{key}_") and "." not in n
    ]
    # A section is what is meant more often than a single key: most keys first.
    tops.sort(key=lambda top: -sum(path.startswith(f"{top}.") for path in table))
    ends = [*tops, *ends]
    if len(ends) == 1 and not tops:
        return _explained(ends[0], *table[ends[0]])
    raise ConfigError([_miss(key, ends, table, models)], "explain")


def _keys_of(hint: Any) -> tuple[tuple[str, str], ...]:
    """The keys of the section that `hint` is, or whose items it holds; none for a value."""
    hint = bare(hint)
    if is_class(hint, BaseModel):
        return tuple((name, field.description or "") for name, field in hint.model_fields.items())
    return tuple(row for member in get_args(hint) for row in _keys_of(member))


def _explain_param(key: str, param: str, models: Models) -> Explanation:
    """A parameter of optimizers or schedules, with everybody who takes it."""
    rows: dict[tuple[str, str], list[str]] = {}
    about = ""
    owners = dict[str, None]()
    for name, (model, owner) in models.items():
        if param not in model.model_fields:
            continue
        said = _explained(key, next(k for k in iter_keys(model) if k.path == param), owner)
        rows.setdefault((said.type, said.default), []).append(name)
        about = about or said.description
        owners[owner] = None
    if not rows:
        known = {n for model, _ in models.values() for n in model.model_fields}
        close = nearest(param, known)
        head = key.removesuffix(param)
        fix = f"did you mean {head + close!r}?" if close else ""
        raise ConfigError([Problem(key, "no installed name takes this parameter", fix)], "explain")
    (kind, default), _ = next(iter(rows.items()))
    taken = tuple(
        (", ".join(names), f"{kind}, default {default}") for (kind, default), names in rows.items()
    )
    one = len(rows) == 1
    return Explanation(
        key,
        ", ".join(owners),
        kind if one else "by name",
        default if one else "by name",
        about,
        taken,
    )


def _explained(key: str, row: Key, owner: str) -> Explanation:
    field = row.field
    spelling = row.path.rpartition(".")[2]
    hidden = is_secret(row.name, field)
    text = field.description or ""
    others = [n for n in names_of(row.name, field) if n != spelling]
    if spelling in old_names(field):
        text = f"Deprecated spelling. {text}"
    elif others:
        text = f"{text} Other spellings: {', '.join(others)}."
    if why := marks(field).get(NOT_OFFERED):
        text = f"{text} Documented but not offered: {why}."
    if why := marks(field).get(WITHOUT_EFFECT):
        text = f"{text} Accepted without effect: {why}."
    annotation: Any = field.annotation
    for extra in field.metadata:
        annotation = Annotated[annotation, extra]
    return Explanation(
        key,
        owner,
        describe(annotation) or "any value",
        _default(field, hidden),
        text.strip(),
        _keys_of(field.annotation),
    )


def _default(field: Any, hidden: bool) -> str:
    value = field.get_default(call_default_factory=False)
    if value is PydanticUndefined or (value is None and field.default_factory is not None):
        return "required" if field.is_required() else "computed"
    if hidden and value is not None:
        return REDACTED
    return json.dumps(
        value, default=lambda v: v.model_dump(mode="json") if isinstance(v, BaseModel) else str(v)
    )


def _open_key(key: str, table: Mapping[str, Owned]) -> Owned | None:
    """A name below an open object: ``optimizer.params.lr`` is explained by ``optimizer.params``."""
    parts = re.sub(r"\[\d+\]", "[]", key).split(".")
    for at in range(len(parts) - 1, 0, -1):
        starred = table.get(".".join((*parts[:at], "*", *parts[at + 1 :])))
        if starred is not None:
            return starred
        row = table.get(".".join(parts[:at]))
        if row is not None and "dict" in str(row[0].field.annotation).lower():
            return row
    return None


def _documented(key: str) -> Explanation:
    name = key.partition(".")[0]
    row = documented()[name]
    owner = row["owner"] or "no package"
    say = (
        f"install it with {install(owner)}"
        if offered_by("sections", name) is not None
        else f"documented but not offered: {row['why']}"
    )
    keys: Any = row["keys"]
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    for at, part in enumerate(parts[1:], 1):
        if not keys or (part not in keys and "*" not in keys):
            close = nearest(part, keys or ())
            fix = (
                f"did you mean {'.'.join((*parts[:at], close))!r}?"
                if close
                else f"{name} is a section"
            )
            raise ConfigError([Problem(key, "DeepSpeed has no such key", fix)], "explain")
        keys = keys.get(part, keys.get("*"))
    kind = "any value" if keys is None else "an object {...}"
    about = f"The section {name!r} is not installed here: {say}."
    return Explanation(
        key, owner, kind, "absent", about, tuple((k, "") for k in keys or () if k != "*")
    )


def _miss(
    key: str, ends: list[str], table: Mapping[str, Owned], models: Mapping[str, Any]
) -> Problem:
    names = {*table, *models, *documented()}
    leaf = key.rpartition(".")[2]
    same = ends or sorted(n for n in table if n.rpartition(".")[2] == leaf)
    close = same or [c for c in [nearest(key, names)] if c]
    shown = " or ".join(repr(c) for c in close[:4]) + (" or ..." if len(close) > 4 else "")
    fix = f"did you mean {shown}?" if close else "`dscore config schema` lists every key"
    if not close and (where := places(models).get(key)):
        fix = f"{key!r} belongs in {where}"
    return Problem(key, "no such key in the core, an installed plugin or DeepSpeed", fix)


def _about(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())
