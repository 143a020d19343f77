"""Tensors in nested containers: what a module takes and returns, or a batch.

Containers are lists, tuples (also named ones) and mappings; `tensors_of` also looks into sets and dataclasses, which
need not be built anew. Everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Size, Tensor

__all__ = ["map_leaves", "tensors_of"]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in `value`, depth first, in the order of its containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each leaf replaced by ``function(leaf)``. Containers keep their type; mappings become dicts."""
    if isinstance(value, Mapping):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Size):  # a torch.Size holds integers only
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)
