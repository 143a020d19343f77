"""How many tiles keep the memory of one below a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ds_run_state.random_streams import STREAMS
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_sequence_parallel.tiles.autocast import Autocasts


class TileBytes:
    """A budget: as few tiles as keep what one of them needs in forward and backward below `nbytes`.

    The need per position is measured once per kind of module and dtype, with two short pieces of
    the inputs: twice what it saves for backward, since each of that has a gradient. Weights and the
    inputs themselves do not count.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise UsageError(f"a tile's budget is {nbytes} bytes; it must be at least 1")
        self.nbytes = nbytes
        self._need: dict[Any, float] = {}

    def count(
        self,
        fn: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        dim: int,
        owner: nn.Module | None = None,
    ) -> int:
        """The number of tiles; at most one per position."""
        first = inputs[0]
        length = inputs[0].shape[dim]
        if length < 2:
            return 1
        sizes = [p.numel() for p in owner.parameters()] if owner is not None else []
        key = (
            type(owner),
            tuple(sizes),
            first.dtype,
            tuple(s for d, s in enumerate(first.shape) if d != dim),
            Autocasts.now(first.device.type),
        )
        if key not in self._need:
            # The difference of two lengths leaves out what does not grow with the sequence, such as
            # weights.
            short = min(length // 2, _PROBE)
            once, twice = (
                _saved_bytes(fn, [t.narrow(dim, 0, n) for t in inputs]) for n in (short, 2 * short)
            )
            self._need[key] = 2 * (twice - once) / short
        return min(length, max(1, math.ceil(length * self._need[key] / self.nbytes)))


_PROBE = 16
"""Positions with which a need is measured, and then with twice as many."""


def _saved_bytes(fn: Callable[..., Tensor], piece: list[Tensor]) -> int:
    """The bytes of what `fn` saves for backward and gives, weights and inputs too.

    Changes no random state.
    """
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage
        return tensor

    # Counted by storage, so that views count once; the probe's own inputs do not count.
    leaves = [t.detach().clone() for t in piece]
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with torch.enable_grad(), hooks, STREAMS.replay(STREAMS.snapshot()):
        out = fn(*[t.requires_grad_() if t.is_floating_point() else t for t in leaves])
    pack(out)
    inputs = {t.untyped_storage()._cdata for t in leaves}
    return sum(storage.nbytes() for key, storage in seen.items() if key not in inputs)
