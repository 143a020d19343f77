"""Finding one's way in the models: the list of every known key, and from the place of an error to
its field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, RootModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ds_core.config.redaction import is_secret_name
from ds_core.config.section import SECRET, is_class, marks, names_of, old_names, union_members
from ds_core.errors import join


def bare(hint: Any) -> Any:
    """`hint` without Annotated, Optional and RootModel around it."""
    while True:
        members = [m for m in union_members(hint) if m is not type(None)]
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif len(members) == 1 and members[0] is not hint:
            hint = members[0]
        elif is_class(hint, RootModel):
            hint = hint.model_fields["root"].annotation
        else:
            return hint


# -- every key -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """One known key.

    path: dotted, with ``[]`` for list items and ``*`` for the names of an open object.

    name: the field's own name, of which the path may show another spelling.
    """

    path: str
    name: str
    field: FieldInfo

    @property
    def spelling(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def iter_keys(hint: Any, prefix: str = "", depth: int = 8) -> Iterator[Key]:
    """Every key below `prefix`, depth first.

    depth: how far to follow models that hold themselves.
    """
    hint = bare(hint)
    if depth == 0:
        return
    for member in union_members(hint) if len(union_members(hint)) > 1 else ():
        yield from iter_keys(member, prefix, depth - 1)
    origin = get_origin(hint)
    args = get_args(hint)
    if is_class(hint, BaseModel):
        for name, field in hint.model_fields.items():
            for spelling in (*names_of(name, field), *old_names(field)):
                yield Key(join(prefix, spelling), name, field)
                yield from iter_keys(field.annotation, join(prefix, spelling), depth - 1)
    elif isinstance(origin, type) and args:
        if issubclass(origin, Mapping):
            yield from iter_keys(args[1], f"{prefix}.*", depth - 1)
        elif issubclass(origin, (Sequence, AbstractSet)):
            yield from iter_keys(args[0], f"{prefix}[]", depth - 1)


def is_secret(name: str, field: FieldInfo | None) -> bool:
    """Whether a key is secret, by its mark, its type (`SecretStr`) or its name."""
    if field is None or is_secret_name(name):
        return is_secret_name(name)
    return SECRET in marks(field) or not {SecretStr, SecretBytes}.isdisjoint(
        union_members(field.annotation)
    )


def secret_names(models: Iterable[type[BaseModel]]) -> frozenset[str]:
    """The keys that these models mark as secret, by name: whatever has such a name is hidden,
    wherever it stands.
    """
    return frozenset(
        key.spelling
        for model in models
        for key in iter_keys(model)
        if is_secret(key.name, key.field)
    )


def names_taking_auto(models: Mapping[str, type[BaseModel]]) -> set[str]:
    """The names of keys and sections that accept the text "auto".

    models: of the sections.
    """
    names = {name for name, model in models.items() if _says_auto(bare(model))}
    keys = (key for model in models.values() for key in iter_keys(model))
    return names | {
        key.spelling
        for key in keys
        if key.field.default == "auto" or _says_auto(key.field.annotation)
    }


def _says_auto(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return "auto" in get_args(hint)
    return any(map(_says_auto, get_args(hint)))


# -- the place of an error -------------------------------------------------------------------------


@dataclass(slots=True)
class Place:
    """Where a location of a pydantic error lies.

    keys: the path as the user wrote it.
    hint: the expected type, Annotated with its bounds.
    given: the value there, as the user wrote it; PydanticUndefined when the data are not at hand.
    parent: the model that the last key belongs to.
    union: how many keys lead to the outermost union that was passed, None without one.
    """

    keys: list[str | int]
    hint: Any
    parent: type[BaseModel] | None = None
    secret: bool = False
    union: int | None = None
    given: Any = PydanticUndefined


def known_names(model: type[BaseModel]) -> dict[str, str]:
    """Every current spelling of the model's keys -> field name."""
    return {
        spelling: name
        for name, field in model.model_fields.items()
        for spelling in names_of(name, field)
    }


def locate(model: Any, loc: Sequence[str | int], data: Any = None) -> Place:
    """Follow `loc` from `model` down.

    data: what was validated, to name keys by the spelling that was used.
    """
    place = Place([], model, given=PydanticUndefined if data is None else data)
    for at, part in enumerate(loc):
        hint = bare(place.hint)
        members = [m for m in union_members(hint) if m is not type(None)]
        if len(members) > 1:  # pydantic puts the tried member's label between the keys
            place.union = len(place.keys) if place.union is None else place.union
            if at + 1 < len(loc):
                place.hint = next((m for m in members if _is_label(part, m)), Any)
        elif part != "[key]":
            _enter(place, hint, part)
    return place


def _enter(place: Place, hint: Any, key: str | int) -> None:
    """Move on to the value under `key`.

    hint: the type of the value that `place` is at, without what is around it.
    """
    field: FieldInfo | None = None
    place.parent = hint if is_class(hint, BaseModel) else None
    if place.parent is None:
        place.hint = _item_hint(hint, key)
    elif (name := known_names(place.parent).get(str(key))) is None:
        place.hint = Any
    else:
        field = place.parent.model_fields[name]
        spellings = (*names_of(name, field), *old_names(field))
        key = next(
            (s for s in spellings if isinstance(place.given, dict) and s in place.given), key
        )
        place.hint = field.annotation
        for extra in field.metadata:
            place.hint = Annotated[place.hint, extra]
    place.keys.append(key)
    place.secret = place.secret or is_secret(str(key), field)
    try:
        place.given = place.given[key]
    except (KeyError, IndexError, TypeError):
        place.given = PydanticUndefined


def _item_hint(hint: Any, part: str | int) -> Any:
    origin = get_origin(hint)
    args = get_args(hint)
    if not isinstance(origin, type) or not args:
        return Any
    if issubclass(origin, Mapping):
        return args[1]
    if issubclass(origin, tuple) and args[-1] is not Ellipsis:
        return args[part] if isinstance(part, int) and part < len(args) else Any
    return args[0] if issubclass(origin, (Sequence, AbstractSet)) else Any


def _is_label(label: str | int, member: Any) -> bool:
    member = get_args(member)[0] if get_origin(member) is Annotated else member
    name = getattr(get_origin(member) or member, "__name__", "")
    text = str(label)
    return bool(name) and (
        text == name or text.startswith(f"{name.lower()}[") or f"[{name}]" in text
    )
