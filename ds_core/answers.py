"""What a hook may return, as small checks that stand beside the hooks' specifications (torch-free).

A check takes what a plugin returned and gives it back in one form (iterables as tuples, mappings as dicts), or raises
`WrongAnswer`, whose text goes after the hook's name: "must return ...". Generators are run here, so that what they
raise is the plugin's failure too. Types are given as references: some of them need torch, and are needed late.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ds_core.entries import Ref, resolve

__all__ = ["Check", "WrongAnswer", "check_of", "gives", "many", "model_class", "named", "nothing", "one_or_none"]

Check = Callable[[Any], Any]
Item = Ref | tuple[str, ...]
"""What an element must be: an instance of the class named, or anything that has the attributes named."""

F = TypeVar("F", bound=Callable[..., Any])


class WrongAnswer(TypeError):
    """A hook returned something that its specification does not allow."""


def gives(check: Check, *, observer: bool = False) -> Callable[[F], F]:
    """Declare the check of what a hook returns. observer: a plugin that fails in it is switched off."""

    def mark(hook: F) -> F:
        hook.ds_answer, hook.ds_observer = check, observer  # type: ignore[attr-defined]
        return hook

    return mark


def check_of(hook: Callable[..., Any]) -> Check:
    """The check that `gives` declared."""
    check: Check = hook.ds_answer  # type: ignore[attr-defined]
    return check


def nothing(value: Any) -> None:
    """None."""
    if value is not None:
        raise WrongAnswer(f"must return nothing, not {_shown(value)}")


def model_class(value: Any) -> Any:
    """A subclass of pydantic's BaseModel."""
    from pydantic import BaseModel

    if not (isinstance(value, type) and issubclass(value, BaseModel)):
        raise WrongAnswer(f"must return a pydantic model class (inherit ds_core.config.Section), not {_shown(value)}")
    return value


def one_or_none(item: Item) -> Check:
    """One `item`, or None."""

    def check(value: Any) -> Any:
        if value is not None and (fault := _fault(value, item)) is not None:
            raise WrongAnswer(f"must return {_wanted(item)} or None, not {fault.removeprefix('is ')}")
        return value

    return check


def many(item: Item, *, or_none: bool = False) -> Check:
    """An iterable of `item`; given back as a tuple. or_none: None is an answer too, and given back as it is."""

    def check(value: Any) -> Any:
        if value is None and or_none:
            return None
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
            raise WrongAnswer(f"must return an iterable of {_plural(item)}, not {_shown(value)}")
        found = tuple(value)
        for index, element in enumerate(found):
            if (fault := _fault(element, item)) is not None:
                raise WrongAnswer(f"must return an iterable of {_plural(item)}, but element {index} {fault}")
        return found

    return check


def named(item: Item) -> Check:
    """A mapping of names to `item`; given back as a dict. Names differ in more than case."""

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise WrongAnswer(f"must return a mapping of names to {_plural(item)}, not {_shown(value)}")
        found = dict(value)
        lowered: dict[str, str] = {}
        for name, element in found.items():
            if not isinstance(name, str) or not name:
                raise WrongAnswer(f"must return a mapping of names to {_plural(item)}, but one name is {name!r}")
            if (fault := _fault(element, item)) is not None:
                raise WrongAnswer(f"must return a mapping of names to {_plural(item)}, but {name!r} {fault}")
            if (twin := lowered.setdefault(name.lower(), name)) != name:
                raise WrongAnswer(f"offers {twin!r} and {name!r}; names must differ in more than case")
        return found

    return check


def _fault(element: Any, item: Item) -> str | None:
    """What is wrong with one element, to go after its name; None when nothing is."""
    if isinstance(item, tuple):
        lacking = [name for name in item if not hasattr(element, name)]
        return f"is {_shown(element)} without {', '.join(lacking)}" if lacking else None
    return None if isinstance(element, resolve(item)) else f"is {_shown(element)}"


def _name(item: Ref) -> str:
    return item.rpartition(":")[2]


def _wanted(item: Item) -> str:
    if isinstance(item, tuple):
        return f"an object with {', '.join(item)}"
    return f"a{'n' if _name(item)[0] in 'AEIOU' else ''} {_name(item)}"


def _plural(item: Item) -> str:
    if isinstance(item, tuple):
        return f"objects with {', '.join(item)}"
    return f"ds_core.entries.{_name(item)}" if item.startswith("ds_core.entries:") else _name(item)


def _shown(value: Any) -> str:
    """A value in a few words: its type, and the usual reason why it is of that type."""
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that nobody awaited it
        return "a coroutine (hooks are plain functions, not async)"
    if value is None:
        return "None (is a return missing?)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"
