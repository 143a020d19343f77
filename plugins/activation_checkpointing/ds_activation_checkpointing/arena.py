"""One block of memory for all checkpoints of a kind, which does not fragment.

The key is ``contiguous_memory_optimization``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from ds_core.errors import UsageError


@dataclass(slots=True)
class _Kind:
    """The memory for tensors of one dtype and device."""

    buffer: Tensor
    length: int
    """Elements of a place."""
    free: list[int] = field(default_factory=list)
    """Places that are free."""


class Arena:
    """Memory for `number` tensors of each size, dtype and device; a place is free again when its
    holder is gone.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._kinds: dict[tuple[object, ...], _Kind] = {}

    def put(self, flat: Tensor, holder: object) -> Tensor:
        """A copy of `flat` in this memory, for as long as `holder` lives.

        Raises UsageError where none is free.
        """
        key = (flat.dtype, flat.device)
        kind = self._kinds.get(key)
        if kind is None:
            kind = _Kind(
                flat.new_empty(self._number * len(flat)), len(flat), list(range(self._number))
            )
            self._kinds[key] = kind
        if len(flat) > kind.length:
            raise UsageError(
                f"contiguous_memory_optimization: a checkpoint has {len(flat)} elements, the first "
                f"one had {kind.length}; checkpoints must be of one size: pad batches, or set it to false"
            )
        if not kind.free:
            raise UsageError(
                f"contiguous_memory_optimization: all {self._number} places for checkpoints are "
                "taken; set activation_checkpointing.number_checkpoints to the number of tensors "
                "that are checkpointed before their backward (blocks times micro-batches at once in "
                "a pipeline), or call reset() after forwards without a backward"
            )
        place = kind.free.pop()
        found = kind.buffer[place * kind.length :][: len(flat)]
        found.copy_(flat)
        # No one has to return a place: a graph that is dropped without a backward returns it, too.
        weakref.finalize(holder, kind.free.append, place).atexit = False
        return found

    def clear(self) -> None:
        """Forget all memory."""
        self._kinds.clear()
