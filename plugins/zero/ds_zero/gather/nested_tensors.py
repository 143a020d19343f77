"""The tensors in the arguments and results of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in `value`, depth first, in their order.

    Searched are lists, tuples, sets, mappings and dataclasses.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field that was declared and never set has no value.
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))
