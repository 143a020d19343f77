"""A store that keeps bytes elsewhere in memory; one for a disk differs in `fetch` and `evict` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import StateStore, is_evicted
from torch import Tensor

if TYPE_CHECKING:
    from ds_core.context import Context


class OldStateStore(StateStore):
    """It never hands out another tensor: it empties the storage of the one it was given, and fills it again."""

    resident = False

    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        super().__init__(ctx, options)
        self.kept: dict[int, torch.UntypedStorage] = {}

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """Fill the storages of those that are away."""
        for tensor in filter(is_evicted, tensors):
            storage = tensor.untyped_storage()
            kept = self.kept[storage._cdata]
            storage.resize_(kept.nbytes())
            storage.copy_(kept)

    def wait(self, tensors: Sequence[Tensor]) -> None:
        """`fetch` has done all."""

    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """Keep the bytes and empty the storages; what has not changed is kept already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if changed:
                self.kept[storage._cdata] = storage.clone()
            storage.resize_(0)

    def discard(self, tensors: Sequence[Tensor]) -> None:
        """Forget them."""
        for tensor in tensors:
            self.kept.pop(tensor.untyped_storage()._cdata, None)
