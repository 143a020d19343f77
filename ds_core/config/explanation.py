"""What one key of the config means: for ``dscore config explain``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ds_core.config.core import CoreConfig
from ds_core.config.keys import Key, iter_keys
from ds_core.config.known import BUILT, OWNERS
from ds_core.config.redaction import REDACTED
from ds_core.config.section import NOT_BUILT, WITHOUT_EFFECT, is_secret, marks, names_of, old_names
from ds_core.config.translate import describe
from ds_core.errors import ConfigError, Problem, nearest

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """path: as asked. owner: distribution and version. type: in words. default: as JSON, or "required"."""

    path: str
    owner: str
    type: str
    default: str
    description: str


def explain(key: str, models: Mapping[str, tuple[type[BaseModel], str]]) -> Explanation:
    """Explain a dotted path such as ``fp16.loss_scale`` or ``tensor_parallel.layer_specs[0].patterns``.

    Raises ConfigError that names the nearest known key when there is no such key.
    """
    if key in models:
        model, owner = models[key]
        return Explanation(key, owner, "an object {...}", "absent", _about(model))
    table: dict[str, Key] = {}
    trees: list[tuple[str, type[BaseModel], str]] = [("", CoreConfig, "ds-core")]
    trees += [(name, model, owner) for name, (model, owner) in models.items()]
    for prefix, model, owner in trees:
        for row in iter_keys(model, prefix, owner):
            table.setdefault(row.path, row)
    found = table.get(re.sub(r"\[\d+\]", "[]", key)) or _open_key(key, table)
    if found is not None:
        return _explained(key, found)
    if key.partition(".")[0] in OWNERS:
        return _documented(key)
    raise ConfigError([_miss(key, table, models)], "explain")


def _explained(key: str, row: Key) -> Explanation:
    field, spelling = row.field, row.path.rpartition(".")[2]
    hidden = is_secret(row.name, field)
    text = field.description or ""
    others = [n for n in names_of(row.name, field) if n != spelling]
    if spelling in old_names(field):
        text = f"Deprecated spelling. {text}"
    elif others:
        text = f"{text} Other spellings: {', '.join(others)}."
    if why := marks(field).get(NOT_BUILT):
        text = f"{text} Documented but not built yet: {why}."
    if why := marks(field).get(WITHOUT_EFFECT):
        text = f"{text} Accepted without effect: {why}."
    annotation: Any = field.annotation
    for extra in field.metadata:
        annotation = Annotated[annotation, extra]
    return Explanation(key, row.owner, describe(annotation) or "any value", _default(field, hidden), text.strip())


def _default(field: Any, hidden: bool) -> str:
    value = field.get_default(call_default_factory=False)
    if value is PydanticUndefined or (value is None and field.default_factory is not None):
        return "required" if field.is_required() else "computed"
    if hidden and value is not None:
        return REDACTED
    return json.dumps(value, default=lambda v: v.model_dump(mode="json") if isinstance(v, BaseModel) else str(v))


def _open_key(key: str, table: Mapping[str, Key]) -> Key | None:
    """A name below an open object: ``optimizer.params.lr`` is explained by ``optimizer.params``."""
    parts = re.sub(r"\[\d+\]", "[]", key).split(".")
    for at in range(len(parts) - 1, 0, -1):
        starred = table.get(".".join((*parts[:at], "*", *parts[at + 1 :])))
        if starred is not None:
            return starred
        row = table.get(".".join(parts[:at]))
        if row is not None and "dict" in str(row.hint).lower():
            return row
    return None


def _documented(key: str) -> Explanation:
    name = key.partition(".")[0]
    owner = OWNERS[name]
    say = (
        f"install it with `pip install {owner}`"
        if name in BUILT
        else f"documented but not built yet; it will come with {owner}"
    )
    return Explanation(key, owner, "an object {...}", "absent", f"The section {name!r} is not installed here: {say}.")


def _miss(key: str, table: Mapping[str, Key], models: Mapping[str, Any]) -> Problem:
    names = {*table, *models, *OWNERS}
    leaf = key.rpartition(".")[2]
    same = sorted(n for n in table if n.rpartition(".")[2] == leaf)
    close = same[0] if same else nearest(key, names)
    mend = f"did you mean {close!r}?" if close else "`dscore config schema` lists every key"
    return Problem(key, "no such key in the core, an installed plugin or the documents", mend)


def _about(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())
