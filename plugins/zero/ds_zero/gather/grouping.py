"""Which parameters of stage 3 stay unsharded, and which module gathers which.

Decisions from the module tree alone, so that `dscore plan` makes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ds_zero.config import LEAF_CLASSES
from ds_zero.gather.leaves import class_names, leaf_flag

if TYPE_CHECKING:
    from ds_zero.config import LeafModules, ZeroConfig

log = logging.getLogger("ds_zero")


@dataclass(frozen=True, slots=True)
class Gatherer:
    """A module that gathers parameters before it runs."""

    # In `named_modules()` of the model; "" is the model itself.
    name: str
    module: nn.Module
    # What it gathers.
    params: tuple[nn.Parameter, ...]
    # Whether `params` has those of everything below the module too, which has no hooks then.
    leaf: bool


def persistent(params: Sequence[nn.Parameter], section: ZeroConfig) -> set[nn.Parameter]:
    """The parameters that stay unsharded: small ones, up to a number of elements in all.

    In order, up to ``model_persistence_threshold`` elements.
    """
    chosen: set[nn.Parameter] = set()
    total = 0
    for param in params:
        # A parameter without elements has nothing to shard, whatever the threshold is.
        small = param.numel() < section.param_persistence_threshold or param.numel() == 0
        if small and total + param.numel() <= section.model_persistence_threshold:
            chosen.add(param)
            total += param.numel()
    return chosen


def gatherers(
    root: nn.Module,
    partitioned: Container[nn.Parameter],
    section: ZeroConfig,
    leaves: set[nn.Module],
) -> list[Gatherer]:
    """The modules to hook, in the order of the tree.

    None below a leaf, none without partitioned parameters.
    """
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[Gatherer]:
        if module in seen:
            return  # a module that is in the tree twice is hooked once
        seen.add(module)
        below = [p for p in dict.fromkeys(module.parameters()) if p in partitioned]
        if not below:
            return
        # Below a leaf nothing is hooked, so the leaf gathers all that is there.
        leaf = module in leaves or _is_fine_grained(module, section.module_granularity_threshold)
        own = dict.fromkeys(module.parameters(recurse=False))
        yield Gatherer(name, module, tuple(p for p in below if leaf or p in own), leaf)
        for child_name, child in () if leaf else module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return list(walk("", root))


def members(
    modules: Sequence[Gatherer], trained: set[nn.Parameter]
) -> Iterator[tuple[Gatherer, list[nn.Parameter], bool]]:
    """(module, parameters, whether the optimizer updates them) of each unit.

    A parameter that several modules share is in the unit of the first.
    """
    taken: set[nn.Parameter] = set()
    for gatherer in modules:
        own = [p for p in gatherer.params if p not in taken]
        taken.update(own)
        # Frozen parameters have no gradients and no masters, so they are units of their own.
        yield gatherer, [p for p in own if p in trained], True
        yield gatherer, [p for p in own if p not in trained], False


def _is_fine_grained(module: nn.Module, threshold: int) -> bool:
    """Whether the module has so few elements per submodule that it is gathered as one unit."""
    descendants = sum(1 for _ in module.modules()) - 1
    return (
        descendants > 0
        and sum(p.numel() for p in module.parameters()) / (1 + descendants) < threshold
    )


def find_leaves(root: nn.Module, wanted: LeafModules) -> set[nn.Module]:
    """The modules that are leaves, by `set_z3_leaf_module` or by the config.

    Warns of entries of the config, other than the defaults, that match no module.
    """
    found: set[nn.Module] = set()
    matched: set[tuple[str, str]] = set()
    for name, module in root.named_modules():
        # By name, plain or dotted: the config has no objects. Subclasses match too.
        classes = class_names(module)
        hits = [("classes", c) for c in wanted.classes if c in classes]
        hits += [("names", n) for n in wanted.names if n == name]
        hits += [("name_suffixes", s) for s in wanted.name_suffixes if name.endswith(s)]
        matched.update(hits)
        # What code has set on the module takes precedence over the config.
        flag = leaf_flag(module)
        if bool(hits) if flag is None else flag:
            found.add(module)
    # The defaults name classes of well-known models; most models have none of them.
    for kind, entries in wanted:
        for entry in entries:
            if (kind, entry) not in matched and entry not in LEAF_CLASSES:
                log.warning(
                    "zero_optimization.leaf_module.%s: no module of the model matches %r",
                    kind,
                    entry,
                )
    return found
