"""Nested containers, such as a batch: lists, tuples (also named ones) and mappings.

Everything else is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Size, Tensor, device


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each leaf replaced by ``function(leaf)``.

    Containers keep their type; mappings become dicts.
    """
    if isinstance(value, Mapping):
        return {key: map_leaves(function, item) for key, item in value.items()}
    # a torch.Size holds integers only
    if isinstance(value, (list, tuple)) and not isinstance(value, Size):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def to_device(value: Any, where: device) -> Any:
    """`value` with its tensors on the device `where`; those that are pinned need not wait."""

    def move(leaf: Any) -> Any:
        # To the host a copy that does not wait could be read too early.
        return (
            leaf.to(where, non_blocking=leaf.device.type == "cpu")
            if isinstance(leaf, Tensor)
            else leaf
        )

    return map_leaves(move, value)
