"""Leaf modules: everything below one is gathered with it.

So ranks may run different parts of it: gathers are collectives, and all ranks must start the same.
What these functions set takes precedence over ``leaf_module`` of the config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ds_core.errors import UsageError, nearest
from ds_zero.gather.weights import owner_of

# On a module: what `set_z3_leaf_module` was given.
_FLAG = "_ds_z3_leaf_flag"
# On a module: that it is a leaf, by a call or by the config.
_NOW = "_ds_z3_leaf"
# On a parameter: the ids of the leaves above it, of which one may be inside another.
_LEAVES = "_ds_z3_leaves"


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Make modules of these classes leaves; returns them. Call it before `initialize`.

    leaf_module_classes: classes (subclasses match too), plain class names, or dotted ones
        (``"package.module.Class"``).
    raise_if_not_found: raise ValueError when no module has one of the classes.

    Raises TypeError for anything else in the list.
    """
    return _change(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """The reverse of `set_z3_leaf_modules`."""
    return _change(model, leaf_module_classes, False, raise_if_not_found)


def _change(model: nn.Module, wanted: Any, flag: bool, strict: bool) -> list[nn.Module]:
    wanted = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
    # All entries are checked before a module is changed.
    for entry in wanted:
        if not isinstance(entry, str) and not (
            isinstance(entry, type) and issubclass(entry, nn.Module)
        ):
            raise TypeError(
                f"leaf modules are named by module classes or class names, not {entry!r}"
            )
    found = [m for m in model.modules() if any(_matches(m, entry) for entry in wanted)]
    if not found and strict:
        raise ValueError(
            f"no module of the model has the class {_names(wanted)}{_hint(wanted, model)}"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _matches(module: nn.Module, entry: type | str) -> bool:
    if not isinstance(entry, str):
        return isinstance(module, entry)
    return entry in class_names(module)


def class_names(module: nn.Module) -> set[str]:
    """The names of the module's class and of its bases, plain and dotted."""
    classes = type(module).__mro__
    return {name for c in classes for name in (c.__name__, f"{c.__module__}.{c.__qualname__}")}


def set_z3_leaf_modules_by_name(
    model: nn.Module, names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules of these names leaves; returns them and the names that were not found.

    names: as ``named_modules()`` has them.
    raise_if_not_found: raise ValueError when a name is not found.
    """
    return _by(model, names, "name", lambda name, entry: name == entry, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make modules whose names end with one of `suffixes` leaves.

    Returns them and the suffixes that match none.

    raise_if_not_found: raise ValueError when there is such a suffix.
    """
    return _by(model, suffixes, "name that ends with", str.endswith, raise_if_not_found)


def _by(
    model: nn.Module, entries: Any, what: str, matches: Callable[[str, str], bool], strict: bool
) -> tuple[list[nn.Module], list[str]]:
    entries = [entries] if isinstance(entries, str) else list(dict.fromkeys(entries))
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"leaf modules are named by strings here, not {entry!r}")
    # An error must leave the model as it was, so what is missing is known before modules are set.
    named = list(model.named_modules())
    found = [m for n, m in named if any(matches(n, entry) for entry in entries)]
    missing = [entry for entry in entries if not any(matches(n, entry) for n, _ in named)]
    if missing and strict:
        close = nearest(missing[0], [n for n, _ in named])
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"no module of the model has the {what} {_names(missing)}{hint}")
    for module in found:
        set_z3_leaf_module(module, True)
    return found, missing


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this module a leaf, or no leaf. Raises UsageError after `initialize`."""
    # In stages 1 and 2 nothing is gathered, so the call has no effect there and does no harm.
    for param in model.parameters():
        owner = owner_of(param)
        if owner is not None and owner[0].section.stage == 3:
            raise UsageError(
                "leaf modules must be set before initialize, which decides what is gathered "
                "together"
            )
    model.__dict__[_FLAG] = flag
    mark_leaf(model, flag)


def mark_leaf(module: nn.Module, flag: bool) -> None:
    """Record on the module and on the parameters below it whether it is a leaf.

    What is no leaf, and in none, has no record.
    """
    if flag:
        module.__dict__[_NOW] = True
    else:
        module.__dict__.pop(_NOW, None)
    for param in module.parameters():
        leaves: set[int] = param.__dict__.setdefault(_LEAVES, set())
        (leaves.add if flag else leaves.discard)(id(module))
        if not leaves:
            del param.__dict__[_LEAVES]


def leaf_flag(module: nn.Module) -> bool | None:
    """What `set_z3_leaf_module` was given for `module`; None: it was not called."""
    flag: bool | None = module.__dict__.get(_FLAG)
    return flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is a leaf; those that the config names are leaves after `initialize`."""
    return bool(model.__dict__.get(_NOW))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Whether the parameter belongs to a leaf, or to a module below one."""
    return bool(param.__dict__.get(_LEAVES))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves of `model`, in its order."""
    return [m for m in model.modules() if z3_leaf_module(m)]


def _names(entries: Iterable[Any]) -> str:
    return ", ".join(e if isinstance(e, str) else e.__name__ for e in entries)


def _hint(wanted: list[Any], model: nn.Module) -> str:
    names = {type(m).__name__ for m in model.modules()}
    close = nearest(_names(wanted[:1]), names) if wanted else None
    return f"; did you mean {close}?" if close else ""
