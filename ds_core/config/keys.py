"""Finding one's way in the models: from a path to its field, and the list of every known key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo

from ds_core.config.section import is_secret, names_of, old_names, union_members
from ds_core.errors import join

__all__ = [
    "MISSING",
    "Key",
    "Place",
    "bare",
    "is_secret_at",
    "iter_keys",
    "known_names",
    "locate",
    "reach",
]


def bare(hint: Any) -> Any:
    """`hint` without Annotated, Optional and RootModel around it."""
    while True:
        members = [m for m in union_members(hint) if m is not type(None)]
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif len(members) == 1 and members[0] is not hint:
            hint = members[0]
        elif isinstance(hint, type) and issubclass(hint, RootModel):
            hint = hint.model_fields["root"].annotation
        else:
            return hint


def _model(hint: Any) -> type[BaseModel] | None:
    return hint if isinstance(hint, type) and issubclass(hint, BaseModel) else None


def known_names(model: type[BaseModel]) -> dict[str, str]:
    """Every current spelling of the model's keys -> field name."""
    return {spelling: name for name, field in model.model_fields.items() for spelling in names_of(name, field)}


MISSING: Any = object()


@dataclass(slots=True)
class Place:
    """Where a location of a pydantic error lies.

    keys: the path as the user wrote it. hint: the expected type, Annotated with its bounds.
    given: the value there, as the user wrote it; MISSING when the data are not at hand.
    field: the field, None for items of lists and dicts. parent: the model that the last key belongs to.
    union: how many keys lead to the outermost union that was passed, None without one.
    """

    keys: list[str | int]
    hint: Any
    field: FieldInfo | None = None
    parent: type[BaseModel] | None = None
    secret: bool = False
    union: int | None = None
    given: Any = MISSING


def locate(model: Any, loc: Sequence[str | int], data: Any = None) -> Place:
    """Follow `loc` from `model` down. data: what was validated, to name keys by the spelling that was used."""
    place = Place([], model)
    here = MISSING if data is None else data
    key: str | int
    for at, part in enumerate(loc):
        hint = bare(place.hint)
        members = [m for m in union_members(hint) if m is not type(None)]
        if len(members) > 1:  # pydantic puts the tried member's label between the keys
            place.union = len(place.keys) if place.union is None else place.union
            if at + 1 < len(loc):
                place.hint = next((m for m in members if _is_label(part, m)), Any)
            continue
        if part == "[key]":
            continue
        parent = _model(hint)
        place.parent, place.field = parent, None
        if parent is not None:
            place.hint, key = _enter(place, parent, str(part), here)
        else:
            key = part
            place.hint = _item_hint(hint, part)
        place.secret = place.secret or is_secret(str(key), place.field)
        place.keys.append(key)
        here = _look(here, key)
    place.given = here
    return place


def _enter(place: Place, parent: type[BaseModel], part: str, here: Any) -> tuple[Any, str]:
    name = known_names(parent).get(part)
    if name is None:
        return Any, part
    field = place.field = parent.model_fields[name]
    spellings = (*names_of(name, field), *old_names(field))
    used = next((s for s in spellings if isinstance(here, dict) and s in here), part)
    annotation: Any = field.annotation
    for extra in field.metadata:
        annotation = Annotated[annotation, extra]
    return annotation, used


def _item_hint(hint: Any, part: str | int) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if not isinstance(origin, type) or not args:
        return Any
    if issubclass(origin, Mapping):
        return args[1]
    if issubclass(origin, tuple) and args[-1] is not Ellipsis:
        return args[part] if isinstance(part, int) and part < len(args) else Any
    return args[0] if issubclass(origin, (Sequence, AbstractSet)) else Any


def _look(data: Any, key: str | int) -> Any:
    try:
        return data[key]
    except (KeyError, IndexError, TypeError):
        return MISSING


def _is_label(label: str | int, member: Any) -> bool:
    member = get_args(member)[0] if get_origin(member) is Annotated else member
    name = getattr(get_origin(member) or member, "__name__", "")
    text = str(label)
    return bool(name) and (text == name or text.startswith(f"{name.lower()}[") or f"[{name}]" in text)


def is_secret_at(core: type[BaseModel], sections: Mapping[str, Any], keys: Sequence[str | int]) -> bool:
    """Whether the value at `keys` of a whole config is secret. sections: models, or parsed sections, by name."""
    head = str(keys[0])
    found = sections.get(head)
    if found is None:
        return any(place.secret for place in reach(core, keys))
    model = found if isinstance(found, type) else type(found)
    return is_secret(head, None) or any(place.secret for place in reach(model, keys[1:]))


def reach(
    hint: Any, keys: Sequence[str | int], field: FieldInfo | None = None, secret: bool = False
) -> Iterator[Place]:
    """Where the keys of *data* can lead: one place for each member of the unions on the way.

    `locate` follows the locations of errors, which say which member was meant.
    """
    if not keys:
        yield Place([], hint, field, secret=secret)
        return
    hint = bare(hint)
    members = [m for m in union_members(hint) if m is not type(None)]
    if len(members) > 1:
        for member in members:
            yield from reach(member, keys, field, secret)
        return
    parent, key = _model(hint), keys[0]
    place = Place([], Any)
    inner = _item_hint(hint, key) if parent is None else _enter(place, parent, str(key), None)[0]
    yield from reach(inner, keys[1:], place.field, secret or is_secret(str(key), place.field))


@dataclass(frozen=True, slots=True)
class Key:
    """One known key. path: dotted, with ``[]`` for list items and ``*`` for the names of an open object.

    name: the field's own name, of which the path may show another spelling.
    """

    path: str
    name: str
    owner: str
    hint: Any
    field: FieldInfo


def iter_keys(hint: Any, prefix: str, owner: str, depth: int = 8) -> Iterator[Key]:
    """Every key below `prefix`, depth first. depth: how far to follow models that hold themselves."""
    hint = bare(hint)
    if depth == 0:
        return
    for member in union_members(hint) if len(union_members(hint)) > 1 else ():
        yield from iter_keys(member, prefix, owner, depth - 1)
    model, origin, args = _model(hint), get_origin(hint), get_args(hint)
    if model is not None:
        for name, field in model.model_fields.items():
            for spelling in (*names_of(name, field), *old_names(field)):
                yield Key(join(prefix, spelling), name, owner, field.annotation, field)
                yield from iter_keys(field.annotation, join(prefix, spelling), owner, depth - 1)
    elif isinstance(origin, type) and args:
        if issubclass(origin, Mapping):
            yield from iter_keys(args[1], f"{prefix}.*", owner, depth - 1)
        elif issubclass(origin, (Sequence, AbstractSet)):
            yield from iter_keys(args[0], f"{prefix}[]", owner, depth - 1)
