"""What hooks may return, and whose fault it is when a plugin fails (torch-free).

A hook is declared with a check (`gives`). The check gives an answer back in one form (iterables as
tuples, mappings as dicts), or raises `WrongAnswer`. It runs generators, so that what they raise is
the plugin's failure too.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from ds_core.entries import Ref, is_reference, resolve
from ds_core.errors import PluginError

if TYPE_CHECKING:
    from ds_core.plugins.discovery import Found

Check = Callable[[Any], Any]
Item = Ref | tuple[str, ...]
"""What an element must be: an instance of the class named, or anything that has the attributes
named.
"""

F = TypeVar("F", bound=Callable[..., Any])


class WrongAnswer(TypeError):
    """A hook returned something that its specification does not allow."""


def gives(check: Check, *, observer: bool = False) -> Callable[[F], F]:
    """Declare a hook, and the check of what it returns.

    observer: a plugin that fails in it is switched off.
    """

    def mark(hook: F) -> F:
        hook.ds_answer = check  # type: ignore[attr-defined]
        hook.ds_observer = observer  # type: ignore[attr-defined]
        return pluggy.HookspecMarker("ds_core")(hook)

    return mark


def nothing(value: Any) -> None:
    """None."""
    if value is not None:
        raise WrongAnswer(f"it must return nothing, not {_shown(value)}")


def model_class(value: Any) -> Any:
    """A subclass of pydantic's BaseModel, or a mapping of names to them."""
    from pydantic import BaseModel

    for model in value.values() if isinstance(value, Mapping) else [value]:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise WrongAnswer(
                "it must return a pydantic model class (inherit ds_core.config.Section), not "
                f"{_shown(model)}"
            )
    return value


def one_or_none(item: Item) -> Check:
    """One `item`, or None."""

    def check(value: Any) -> Any:
        if value is not None and not _fits(value, item):
            raise WrongAnswer(
                f"it must return {_words(item, 'a', 'an object')} or None, not {_shown(value)}"
            )
        return value

    return check


def many(item: Item, *, or_none: bool = False) -> Check:
    """An iterable of `item`; given back as a tuple.

    or_none: None is an answer too, and given back as it is.
    """

    def check(value: Any) -> Any:
        if value is None and or_none:
            return None
        wanted = f"it must return an iterable of {_words(item)}"
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
            raise WrongAnswer(f"{wanted}, not {_shown(value)}")
        found = tuple(value)
        for index, element in enumerate(found):
            if not _fits(element, item):
                raise WrongAnswer(f"{wanted}, but element {index} is {_shown(element)}")
        return found

    return check


def named(item: Item) -> Check:
    """A mapping of names to `item`; given back as a dict. Names differ in more than case."""

    def check(value: Any) -> Any:
        wanted = f"it must return a mapping of names to {_words(item)}"
        if not isinstance(value, Mapping):
            raise WrongAnswer(f"{wanted}, not {_shown(value)}")
        found = dict(value)
        lowered: dict[str, str] = {}
        for name, element in found.items():
            if not isinstance(name, str) or not name:
                raise WrongAnswer(f"{wanted}, but one name is {name!r}")
            if not _fits(element, item):
                raise WrongAnswer(f"{wanted}, but {name!r} is {_shown(element)}")
            if (twin := lowered.setdefault(name.lower(), name)) != name:
                raise WrongAnswer(
                    f"it offers {twin!r} and {name!r}; names must differ in more than case"
                )
        return found

    return check


def references(value: Any) -> Any:
    """A mapping of names to references; functions themselves are imported too early, and go with a
    warning.
    """
    found: dict[str, Any] = named(("__class__",))(value)
    for name, element in found.items():
        if not isinstance(element, str) and not callable(element):
            raise WrongAnswer(
                f"it must return a mapping of names to references, but {name!r} is "
                f"{_shown(element)}"
            )
        if isinstance(element, str) and not is_reference(element):
            raise WrongAnswer(
                f"{name!r} is {element!r}, which is no reference 'package.module:function'"
            )
        if not isinstance(element, str):
            where = f"{element.__module__}:{getattr(element, '__qualname__', name)}"
            text = (
                f"{name!r} is given as a function; give the reference {where!r}, which is imported "
                "when it is used"
            )
            warnings.warn(text, DeprecationWarning, stacklevel=2)
    return found


def numbers(value: Any) -> Any:
    """A mapping of names to numbers, and tensors of one element."""
    for name, number in (found := named(("__float__",))(value)).items():
        if getattr(number, "numel", lambda: 1)() != 1:
            raise WrongAnswer(
                f"{name!r} must be a number or a tensor of one element, not {_shown(number)}"
            )
    return found


def periods(value: Any) -> Any:
    """A mapping of names to whole numbers from 0 on."""
    for name, number in (found := named(("__index__",))(value)).items():
        if isinstance(number, bool) or number < 0:
            raise WrongAnswer(f"{name!r} must be a whole number from 0 on, not {_shown(number)}")
    return found


def _fits(element: Any, item: Item) -> bool:
    if isinstance(item, tuple):
        return all(hasattr(element, name) for name in item)
    return isinstance(element, resolve(item))


def _words(item: Item, one: str = "", thing: str = "objects") -> str:
    return (
        f"{thing} with {', '.join(item)}"
        if isinstance(item, tuple)
        else f"{one} {item.rpartition(':')[2]}".strip()
    )


def _shown(value: Any) -> str:
    """A value in a few words: its type, and the usual reason why it is of that type."""
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited
        return "a coroutine (hooks are plain functions, not async)"
    if value is None:
        return "None (is a return missing?)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


# -- whose fault it is -----------------------------------------------------------------------------


def blame(found: Found, what: str, error: BaseException) -> PluginError:
    """The error ``plugin <found> <what>: <cause>``.

    A KeyboardInterrupt is raised again as it is.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    kind = "" if isinstance(error, (WrongAnswer, PluginError)) else f"{type(error).__name__}: "
    return PluginError(f"plugin {found} {what}: {kind}{error}")


@contextlib.contextmanager
def blaming(
    found: Found, what: str, *, passing: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Whatever is raised inside, SystemExit included, is raised as `blame` tells it.

    passing: errors left alone.
    """
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        raise blame(found, what, error) from error
