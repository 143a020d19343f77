"""Which modules a config's patterns mean, and whether a technique fits them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import nn

from ds_core.errors import ConfigError, Problem

Kind = str
"""linear, conv, embedding or norm."""

DEFAULT = ("linear", "conv")
"""What ``"*"`` means."""


def kind_of(module: nn.Module) -> Kind | None:
    """What sort of layer it is; None for one that nothing here applies to."""
    if isinstance(module, nn.Linear) or _is_conv1d(module):
        return "linear"
    if isinstance(module, nn.Conv2d):
        return "conv"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norm" if isinstance(module, nn.modules.batchnorm._BatchNorm) else None


def _is_conv1d(module: nn.Module) -> bool:
    """Transformers' linear layer with its weight the other way round; transformers is not imported
    for it.
    """
    return any(
        c.__name__ == "Conv1D" and c.__module__.startswith("transformers.")
        for c in type(module).__mro__
    )


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is inputs times outputs."""
    return _is_conv1d(module)


def sizes(module: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of its weight as a matrix."""
    parameter = module._parameters["weight"]
    assert parameter is not None
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if _is_conv1d(module):
        shape = shape[::-1]
    rest = 1
    for size in shape[1:]:
        rest *= size
    return shape[0], rest


def matching(
    model: nn.Module, pattern: str, kinds: Sequence[Kind]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `kinds` in whose names `pattern` is found, in the model's order; "*" means all
    of `DEFAULT`.
    """
    allowed = tuple(k for k in kinds if k in DEFAULT) if pattern == "*" else kinds
    for name, module in model.named_modules():
        if kind_of(module) in allowed and (pattern == "*" or re.search(pattern, name)):
            yield name, module


def chosen(
    model: nn.Module,
    technique: str,
    groups: dict[str, Any],
    kinds: Sequence[Kind],
    missing: list[Problem],
    excluded: Sequence[str] = (),
) -> Iterator[tuple[str, str, nn.Module]]:
    """(group, name, module) for every module that a technique is to be applied to.

    Patterns that match nothing are added to `missing`: another stage of a pipeline may have what
    they match. Raises ConfigError for a module in two groups.
    """
    taken: dict[str, str] = {}
    for group, settings in groups.items():
        for index, pattern in enumerate(settings.modules):
            path = f"compression_training.{technique}.different_groups.{group}.modules[{index}]"
            found = list(matching(model, pattern, kinds))
            if not found:
                known = [n for n, m in model.named_modules() if kind_of(m) in kinds]
                shown = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "") or "none"
                what = f"{pattern!r} matches no {' or '.join(kinds)} layer of the model"
                missing.append(Problem(path, what, f"it has {shown}"))
            for name, module in found:
                if any(re.search(e, name) for e in excluded):
                    continue
                if name not in taken:
                    taken[name] = group
                    yield group, name, module
                elif taken[name] != group:
                    fix = "make the patterns of the groups exclude each other"
                    refuse(path, f"{name} is in group {taken[name]!r} already", fix)


def refuse(path: str, message: str, fix: str) -> NoReturn:
    """Raise the ConfigError that a key is in the way."""
    raise ConfigError([Problem(path, message, fix)])
