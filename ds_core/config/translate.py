"""From a pydantic error to plain words: the key's path, the value, what was expected, the nearest
known key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ds_core.config.keys import Place, bare, known_names, locate, secret_names
from ds_core.config.redaction import REDACTED, scrub, secrets_in, show
from ds_core.config.section import is_class, union_members
from ds_core.config.unknown import unknown_key
from ds_core.errors import Problem, join, nearest, path_text

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}
_LENGTHS = {"min_length": "at least", "max_length": "at most"}
_OWN_WORDS = {"value_error", "assertion_error"}


def translate_errors(
    error: ValidationError,
    model: type[BaseModel],
    path: str = "",
    *,
    owner: str = "",
    data: Any = None,
    elsewhere: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Every error of `model`, in plain words, with paths that start with `path`.

    owner: who owns the section, named with suggestions.
    data: what was validated, so that keys are named by the spelling that was used and unions are
        understood.
    elsewhere: key -> the path where it belongs, for keys that stand in the wrong place.
    """
    rows = []
    hidden = secrets_in(data, secret_names([model]))
    for item in error.errors(include_url=False):
        kind = item["type"]
        loc = item["loc"]
        # a list that is too short for its tuple
        if kind == "missing" and loc and isinstance(loc[-1], int):
            kind = "too_short"
            loc = loc[:-1]
        place = locate(model, loc, data)
        problem = _problem(kind, item, place, path, owner, elsewhere or {})
        rows.append(
            (
                Problem(problem.path, scrub(problem.message, hidden), scrub(problem.fix, hidden)),
                place,
            )
        )
    # One problem per key; where a member of a union was entered, only what is wrong inside it.
    found: dict[str, Problem] = {}
    entered = {
        tuple(p.keys[: p.union]) for _, p in rows if p.union is not None and len(p.keys) > p.union
    }
    for problem, place in rows:
        if len(place.keys) != place.union or tuple(place.keys) not in entered:
            found.setdefault(problem.path, problem)
    return list(found.values())


def _problem(
    kind: str,
    item: Mapping[str, Any],
    place: Place,
    root: str,
    owner: str,
    elsewhere: Mapping[str, str],
) -> Problem:
    ctx = item.get("ctx") or {}
    value = item["input"] if place.given is PydanticUndefined or kind == "missing" else place.given
    where = path_text(place.keys, root)
    section = path_text(place.keys[:-1], root)
    if kind == "extra_forbidden" and place.parent is not None:
        key = str(place.keys[-1])
        return unknown_key(
            section, key, value, known_names(place.parent), owner, elsewhere.get(key)
        )
    shown = REDACTED if place.secret and value is not None else show(value)
    if kind == "missing":
        return Problem(where, f"is required and missing; it must be {describe(place.hint)}")
    if kind == "ds_clash":
        new = join(section, ctx["new"])
        return Problem(
            join(section, ctx["old"]),
            f"is {ctx['kind']} of {new}, and both are set",
            f"keep {new} only",
        )
    if kind == "ds_not_offered":
        return Problem(
            where, f"{shown} is documented but not offered ({ctx['why']})", "leave the key out"
        )
    if kind in _OWN_WORDS:
        return Problem(
            where, f"{str(ctx.get('error', item['msg'])).rstrip('.')} (the value is {shown})"
        )
    if kind == "finite_number":
        return Problem(
            where, f"must be {describe(place.hint)}, not {shown}", "write a finite number"
        )
    expected = describe(place.hint) if _standard(kind) else ""
    if not expected:
        text = re.sub(r"^(Input should be|Value should be) ", "must be ", str(item["msg"]))
        return Problem(where, f"{text[:1].lower()}{text[1:]} (the value is {shown})")
    return Problem(where, f"must be {expected}, not {shown}", _fix(place.hint, value, place.secret))


def _standard(kind: str) -> bool:
    """Whether the expected type says all that there is to say."""
    ends = (
        "_type",
        "_parsing",
        "_from_float",
        "_error",
        "_expected",
        "_size",
        "enum",
        "_too_short",
        "_too_long",
    )
    starts = (
        "greater_than",
        "less_than",
        "multiple_of",
        "too_short",
        "too_long",
        "is_instance_of",
        "model_",
    )
    return kind.endswith(ends) or kind.startswith(starts)


def _fix(hint: Any, value: Any, hidden: bool) -> str:
    kinds = {bare(m) for m in union_members(bare(hint)) if not get_origin(m)}
    numeric = bool({int, float} & kinds)
    if isinstance(value, bool) and numeric:
        return "true and false are not numbers"
    if isinstance(value, str) and not hidden:
        if numeric and re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", value):
            return f"write {value.strip()} without quotes"
        if bool in kinds and value.strip().lower() in ("true", "false", "yes", "no", "on", "off"):
            return (
                f"write {'true' if value.strip().lower() in ('true', 'yes', 'on') else 'false'} "
                "without quotes"
            )
        close = nearest(value, [c for c in _choices(hint) if isinstance(c, str)])
        return f"did you mean {json.dumps(close)}?" if close else ""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and kinds == {bool}:
        return f"write {'true' if value else 'false'}" if value in (0, 1) else ""
    return ""


def _choices(hint: Any) -> tuple[Any, ...]:
    hint = bare(hint)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if is_class(hint, Enum):
        return tuple(m.value for m in hint)
    members = union_members(hint)
    return tuple(c for m in members for c in _choices(m)) if len(members) > 1 else ()


def describe(hint: Any) -> str:
    """What `hint` accepts, in plain words: ``a whole number > 0``; empty when there are no words
    for it.
    """
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        said = describe(inner)
        first, other, rest = (
            said.partition(" or ") if len(union_members(inner)) > 1 else (said, "", "")
        )
        # a bound is about the number or the text, not about the null next to it
        bounds = _bounds(extras, first)
        return f"{first} {bounds}{other}{rest}" if said and bounds else said
    members = union_members(hint)
    if len(members) > 1:
        words = [describe(m) for m in members]
        return " or ".join(dict.fromkeys(words)) if all(words) else ""
    choices = _choices(hint)
    if choices:
        shown = [json.dumps(c) if isinstance(c, (str, bool)) else str(c) for c in choices]
        return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"
    origin = get_origin(hint) or hint
    args = get_args(hint)
    return _describe_type(bare(hint) if bare(hint) is not hint else origin, args)


_SIMPLE: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    None: "null",
}


def _describe_type(kind: Any, args: tuple[Any, ...]) -> str:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if not isinstance(kind, type):
        return describe(kind) if get_origin(kind) else ""
    if issubclass(kind, BaseModel):
        return "an object {...}"
    if issubclass(kind, Mapping):
        return (
            f"an object whose values are {describe(args[1])}"
            if args and describe(args[1])
            else "an object {...}"
        )
    if issubclass(kind, tuple) and args and args[-1] is not Ellipsis:
        each = f", each {describe(args[0])}" if len(set(args)) == 1 else ""
        return f"a list of {len(args)} items{each}"
    if issubclass(kind, (Sequence, AbstractSet)):
        return (
            f"a list whose items are {describe(args[0])}"
            if args and describe(args[0])
            else "a list"
        )
    return "a path (text)" if issubclass(kind, PurePath) else ""


def _bounds(extras: Iterable[Any], said: str) -> str:
    words = []
    for extra in [e for x in extras for e in (x.metadata if isinstance(x, FieldInfo) else (x,))]:
        for name, sign in _BOUNDS.items():
            if getattr(extra, name, None) is not None:
                words.append(f"{sign} {getattr(extra, name)}")
        for name, sign in _LENGTHS.items():
            if getattr(extra, name, None) is not None:
                unit = "characters" if said == "text" else "items"
                words.append(
                    f"of {sign} {getattr(extra, name)} "
                    f"{unit if getattr(extra, name) != 1 else unit[:-1]}"
                )
        if getattr(extra, "pattern", None) is not None:
            words.append(f"that matches {extra.pattern}")
    return " and ".join(words)
