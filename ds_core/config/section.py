"""What a section of the config is: a strict, frozen pydantic model, and the marks a field can
carry.

Strict means: a boolean is not a number, text is not a number, NaN and Infinity are refused, unknown
keys are errors. Lenient only where JSON has no better word: ``5e8`` is a whole number, a list may
become a tuple or a set, text may name an `Enum` member or a `Path`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

OLD_NAMES = "x-ds-old-names"
SECRET = "x-ds-secret"
NOT_OFFERED = "x-ds-not-offered"
WITHOUT_EFFECT = "x-ds-without-effect"
PER_RANK = "x-ds-per-rank"
WHOLE = 2**63
"""Whole numbers of a config are less: tensors, stores and kernels hold no more."""


def option(
    default: Any,
    description: str,
    *,
    old: Sequence[str] = (),
    secret: bool = False,
    not_offered: str = "",
    without_effect: str = "",
    per_rank: bool = False,
    **field: Any,
) -> Any:
    """A field of a section; `field` goes to `pydantic.Field` (``gt=0``, ``alias=...``).

    default: ``...`` for a required key.
    description: what it does, with the unit.
    old: deprecated spellings of the key: their value is moved here, with a note in the log; both
        set is an error.
    secret: shown as ``***`` in every echo, log, error and checkpoint.
    not_offered: why the option is documented but not offered, and what to use; then only `default`
        is accepted.
    without_effect: why another value than `default` changes nothing, by design; a warning of rank 0
        says it.
    per_rank: ranks may have different values, since it only says what this one writes to its log.
    """
    said = {
        OLD_NAMES: list(old),
        SECRET: secret,
        "writeOnly": secret,
        NOT_OFFERED: not_offered,
        WITHOUT_EFFECT: without_effect,
        PER_RANK: per_rank,
    }
    extra = field.pop("json_schema_extra", {}) | {
        mark: value for mark, value in said.items() if value
    }
    return Field(default, description=description, json_schema_extra=extra or None, **field)


def marks(field: FieldInfo) -> Mapping[str, Any]:
    """The marks of a field (see the constants above); empty for an unmarked one."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def old_names(field: FieldInfo) -> tuple[str, ...]:
    """The deprecated spellings of a field."""
    return tuple(marks(field).get(OLD_NAMES, ()))


def names_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Every current spelling of a field: its name, then its alias."""
    return (name,) if field.alias in (None, name) else (name, field.alias)


def union_members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_class(hint: Any, *kinds: type) -> bool:
    """Whether `hint` is a subclass of one of `kinds`; list[int] is none, though it is a class in Python
    3.10.
    """
    return get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, kinds)


class Trait:
    """What a section says of a run, for other plugins to ask by `RunConfig.has`; a plugin may define
    others.
    """

    PARTITIONS_STATES = "partitions_states"
    """A rank has optimizer states for a part of the parameters."""
    PARTITIONS_GRADIENTS = "partitions_gradients"
    """A rank has reduced gradients of a part of the parameters."""
    RELEASES_WEIGHTS = "releases_weights"
    """Weights are there while a layer needs them (`Partitioner.releases_weights`)."""
    DIVIDES_DEPTH = "divides_depth"
    """A rank has some of the model's layers, and runs whole batches."""
    RECOMPUTES = "recomputes"
    """Blocks are computed again in backward."""
    CHANGES_SAVED = "changes_saved"
    """What is kept for backward is not what the modules would save."""
    COMPILE_PASS = "compile_pass:"
    """Goes before the name of a pass over compiled graphs."""


class Clash(NamedTuple):
    """Stands in for the value of a key of which two spellings are set.

    kind: what `old` is of `new`.
    """

    old: str
    new: str
    kind: str = "the old name"


class Section(BaseModel):
    """Base of every section, the core's and the plugins'.

    Give every field a `description` with its unit.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        allow_inf_nan=False,
        loc_by_alias=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """(key, sentence) for each key that has no effect with these values, or is deprecated.

        given: the section as it was written. Logged once on rank 0; see `ds_core.config.build`. A
        key of "" is the section itself.
        """
        return ()

    writes_outside: ClassVar[tuple[str, ...]] = ()
    """For a section whose plugin writes where the user's runs do: the keys that keep it from that
    as false or 0.
    """

    def traits(self) -> Iterable[str]:
        """What the run is like with these values, for plugins that ask: of `Trait`, or words of the
        plugin's own.
        """
        return ()

    @model_validator(mode="before")
    @classmethod
    def _move_old_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        moved = data
        for old, new in _moves(cls).items():
            if old not in data:
                continue
            moved = dict(data) if moved is data else moved
            value = moved.pop(old)
            taken = [n for n in names_of(new, cls.model_fields[new]) if n in moved]
            for name in taken:
                del moved[name]
            moved[new] = Clash(old, taken[0]) if taken else value
        for name, field in cls.model_fields.items():
            if field.alias not in (None, name) and {name, field.alias} <= moved.keys():
                rest = {key: value for key, value in moved.items() if key != field.alias}
                moved = rest | {name: Clash(str(field.alias), name, "another spelling")}
        return moved

    @field_validator("*", mode="wrap")
    @classmethod
    def _prepare(cls, value: Any, handler: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Clash):
            raise PydanticCustomError(
                "ds_clash", "{old} is {kind} of {new}, and both are set", value._asdict()
            )
        # JSON has no tuples, enums or paths, and may write whole numbers as 5e8.
        field = cls.model_fields[str(info.field_name)]
        fitted = fit(field.annotation, value)
        result = handler(fitted)
        if not _exactly(field.annotation, fitted):
            raise PydanticCustomError("ds_literal_type", "not one of the choices")
        items = result if isinstance(result, (list, tuple)) else (result,)
        if any(type(item) is int and not -WHOLE <= item < WHOLE for item in items):
            raise PydanticCustomError(
                "ds_too_large", "must be a whole number below 2**63, of 64 bits"
            )
        # Written out, the default of an option that is not offered changes nothing.
        mark = marks(field)
        if NOT_OFFERED in mark and not _same(result, field.get_default()):
            raise PydanticCustomError("ds_not_offered", "{why}", {"why": mark[NOT_OFFERED]})
        return result

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        from ds_core.config.redaction import redact

        marked = {name for name, field in type(self).model_fields.items() if SECRET in marks(field)}
        yield from redact(dict(super().__repr_args__()), marked).items()


@functools.cache
def _moves(model: type[Section]) -> dict[str, str]:
    return {old: name for name, field in model.model_fields.items() for old in old_names(field)}


def _exactly(hint: Any, value: Any) -> bool:
    """False for true where a `Literal` lists 1: they are equal in Python, but not in a config."""
    members = union_members(hint)
    choices = [a for m in members if get_origin(m) is Literal for a in get_args(m)]
    only_choices = all(get_origin(m) is Literal or m is type(None) for m in members)
    mixed = isinstance(value, (bool, int)) and only_choices
    return not mixed or any(_same(a, value) for a in choices)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def fit(hint: Any, value: Any) -> Any:
    """`value` in the Python type that `hint` asks for, where JSON could not say it; otherwise
    unchanged.
    """
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return fit(args[0], value)
    members = union_members(hint)
    if len(members) > 1:
        if type(value) in members:
            return value
        fitted = (fit(m, value) for m in members)
        return next((f for f in fitted if f is not value), value)
    if type(value) is float and value.is_integer():
        wanted = hint is int or (
            origin is Literal and any(type(a) is int and a == value for a in args)
        )
        return int(value) if wanted else value
    if isinstance(value, (list, tuple)):
        return _fit_items(hint, origin, args, value)
    if isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, Mapping):
        return {k: fit(args[1], v) for k, v in value.items()}
    if isinstance(value, str) and is_class(hint, Enum, PurePath):
        with contextlib.suppress(ValueError):  # the model's own error says what was expected
            return hint(value)
    return value


def _fit_items(hint: Any, origin: Any, args: tuple[Any, ...], value: Sequence[Any]) -> Any:
    kind = origin or hint
    if not isinstance(kind, type):
        return value
    if issubclass(kind, tuple) and args and args[-1] is not Ellipsis:
        return tuple(map(fit, itertools.chain(args, itertools.repeat(Any)), value))
    items = [fit(args[0], v) for v in value] if args else list(value)
    if issubclass(kind, tuple):
        return tuple(items)
    if issubclass(kind, AbstractSet):
        with contextlib.suppress(TypeError):  # unhashable items
            return set(items) if kind is set else frozenset(items)
    return items
