"""Parts of a model that features treat one by one, its repeated blocks or those that a config
names; and what they ask of a partitioner that does not keep weights at hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import nn

from ds_core import comm
from ds_core.errors import ConfigError, Problem, UsageError, did_you_mean


@runtime_checkable
class GathersWhole(Protocol):
    """A partitioner that gathers weights for each module, and can do so for a module and all below
    it as one.
    """

    def gather_whole(self, module: nn.Module) -> None:
        """From now on the weights of `module` and of all below it are there from the begin of its
        forward to its end, and of its backward; between its first operation and its last no hook of
        the partitioner's runs.
        """


@runtime_checkable
class HoldsWeights(Protocol):
    """A partitioner that gathers weights for each module, and can hold all of them for a while."""

    @property
    def weights_away(self) -> bool:
        """Whether they rest where reading them takes time (a disk), since memory has no room for
        all.
        """

    def weights_held(self, at_once: int) -> AbstractContextManager[None]:
        """Inside, all weights are there, as exactly as they rest, and no hook of the partitioner's
        runs. Collective.

        at_once: how many gathers are under way at a time.
        """


ROWS_TOGETHER = "ds_rows_together"
"""Attribute of a module, true where what lies below it computes all rows of a call together, in an
order of its own (sorted by expert): no part of the rows can be given to it.
"""


def of_rows_together(model: nn.Module) -> set[nn.Module]:
    """The modules whose rows cannot be cut, see `ROWS_TOGETHER`."""
    marked = [m for m in model.modules() if getattr(m, ROWS_TOGETHER, False)]
    return {below for module in marked for below in module.modules()}


def find_blocks(
    model: nn.Module, wanted: Sequence[str], key: str, otherwise: str
) -> dict[str, nn.Module]:
    """This rank's part of the modules that `wanted` names, as in `chosen`, or of the repeated
    blocks where it is empty.

    Whether an entry fits, and whether a block is repeated, is a question about the whole model, of
    which ranks may have parts (the stages of a pipeline).

    otherwise: what to do where no block is repeated.

    Collective; raises UsageError, on all ranks, for an entry that fits no module of any of them,
    and where there is no block.
    """
    mine = dict(_composed(model))
    everyone = comm.all_gather_json([mine, [entry for entry in wanted if _fits(model, entry, key)]])
    if absent := set(wanted).difference(*(fitting for _, fitting in everyone)):
        chosen(model, sorted(absent), key)  # raises
    if not wanted and all(composed == mine for composed, _ in everyone):
        if not (found := repeated_blocks(model)):
            raise UsageError(f"{key}: {type(model).__name__} has no repeated block; {otherwise}")
        return found
    if not wanted:
        whole = {name: kind for composed, _ in everyone for name, kind in composed.items()}
        often = Counter(whole.values())
        if max(often.values(), default=0) < 2:
            raise UsageError(
                f"{key}: the stages of {type(model).__name__} have no repeated block; {otherwise}"
            )
        wanted = sorted({kind for kind in mine.values() if often[kind] > 1})
    here = [entry for entry in wanted if _fits(model, entry, key)]
    return chosen(model, here, key) if here else {}


def check_missing(missing: Sequence[Problem], origin: str) -> None:
    """Raise ConfigError for entries of the config that fit nothing on any rank. Collective.

    missing: those that fit nothing in this rank's part of the model.
    """
    mine = {problem.path: problem for problem in missing}
    absent = set(mine).intersection(*comm.all_gather_json(list(mine)))
    if absent:
        raise ConfigError([problem for path, problem in mine.items() if path in absent], origin)


def _composed(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, class) of modules with modules of their own, in lists, dicts and sequences: what
    blocks are chosen of.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            for child_name, child in module.named_children():
                if next(child.children(), None) is not None:
                    yield f"{name}.{child_name}".lstrip("."), type(child).__name__


def _fits(model: nn.Module, entry: str, key: str) -> bool:
    try:
        chosen(model, [entry], key)
    except UsageError:
        return False
    return True


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's blocks, such as the layers of a transformer, by name; empty where it has none.

    They are the outermost modules with modules of their own and parameters that stand in a list,
    dict or sequence next to another one of their class.
    """
    return dict(_blocks(model, ""))


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    held = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    often = Counter(type(child) for child in module.children()) if held else Counter()
    for name, child in module.named_children():
        here = prefix + name
        composed = (
            next(child.children(), None) is not None and next(child.parameters(), None) is not None
        )
        if (
            composed
            and often[type(child)] > 1
            and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        ):
            yield here, child
        else:
            yield from _blocks(child, here + ".")


def chosen_or_repeated(
    model: nn.Module, wanted: Sequence[str] | None, key: str
) -> dict[str, nn.Module]:
    """The modules that `wanted` names, as in `chosen`; the repeated blocks where it names none."""
    return chosen(model, wanted, key) if wanted else repeated_blocks(model)


def chosen(model: nn.Module, wanted: Sequence[str], key: str) -> dict[str, nn.Module]:
    """The outermost modules that `wanted` names: class names, or names of modules with ``*`` and
    the like.

    key: of the config, for messages.

    Raises UsageError for an entry that fits no module.
    """
    found: dict[str, nn.Module] = {}
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    for entry in wanted:
        fits = {
            n: m
            for n, m in modules.items()
            if type(m).__name__ == entry or (n and fnmatchcase(n, entry))
        }
        if not fits:
            known = sorted({type(m).__name__ for m in modules.values()})
            raise UsageError(
                f"{key}: no module of the model is called {entry!r}, or is of that class. "
                f"{did_you_mean(entry, [*known, *modules])} Its classes are {', '.join(known)}"
            )
        found.update(fits)
    inner = {m for outer in found.values() for m in outer.modules() if m is not outer}
    return {
        name: module for name, module in modules.items() if name in found and module not in inner
    }
