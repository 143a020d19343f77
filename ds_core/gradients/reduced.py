"""The reduced gradients of one optimizer step, as `ds_gradients` plugins see and change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_core import comm

if TYPE_CHECKING:
    from ds_core.context import Context


@dataclass(frozen=True, slots=True)
class GradientShard:
    """This rank's elements of one parameter's gradient."""

    # The parameter's name.
    name: str
    # The elements, to be changed in place: in the parameter's `shape` or flat, in the dtype in
    # which they are accumulated, times 1 / `Gradients.factor`.
    tensor: Tensor
    # The full parameter's shape.
    shape: tuple[int, ...]
    # The shard is the range [start, stop) of the row-major flattened parameter.
    start: int
    stop: int
    # Mesh axes along which ranks have different parameters under this name.
    held: tuple[str, ...]
    # Mesh axes along which all ranks' elements are disjoint; along the others every rank has the
    # same, and must change them in the same way.
    axes: tuple[str, ...]
    # False for a copy of a parameter that another rank counts (tied weights).
    counted: bool = True

    def take(self, values: Tensor) -> Tensor:
        """The elements of `values`, of the parameter's shape, that belong to this shard, in the
        shape of `tensor`.
        """
        return values.reshape(-1)[self.start : self.stop].view(self.tensor.shape)


class Gradients:
    """One step's gradients, reduced and finite.

    shards: those of this rank; of a parameter that no rank used there are none.
    factor: a gradient is its tensor times `factor`, which undoes the loss scale and divides by what
        is not divided yet.
    norm: the global L2 norm of the gradients (times `factor`) before any plugin changed them.
    step: the optimizer step, counted from 0.
    """

    def __init__(
        self,
        ctx: Context,
        shards: Sequence[GradientShard],
        *,
        factor: float,
        norm: float,
        step: int,
    ) -> None:
        self._ctx = ctx
        self.shards = shards
        self.factor = factor
        self.norm = norm
        self.step = step

    def total(self, value: Callable[[Tensor], Tensor]) -> float:
        """`value` of each shard's tensor, a 0-d tensor, summed so that each element of the model
        counts once.

        The same on all ranks. Collective.
        """
        mesh = self._ctx.mesh
        total = self._zeros(1)
        for shard in self.shards:
            if shard.counted:
                copies = mesh.world_size // mesh.size(*shard.axes)
                total += value(shard.tensor).to(total) / copies
        if mesh.world_size > 1:
            comm.all_reduce(total)
        return total.item()

    def sums(self, value: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """`value` of each shard's tensor, a 0-d tensor, summed over the shards of each parameter
        that this rank has.

        The same on all ranks with the parameter. Collective.
        """
        mesh = self._ctx.mesh
        found: dict[str, float] = {}
        of = {shard.name: shard for shard in self.shards}
        for axes in sorted({info.replicas for info in self._ctx.params.values()}):
            names = [info.name for info in self._ctx.params.values() if info.replicas == axes]
            values = self._zeros(len(names))
            for place, name in enumerate(names):
                if (shard := of.get(name)) is not None:
                    copies = mesh.size(*shard.held, *axes) // mesh.size(*shard.axes)
                    values[place] = value(shard.tensor).to(values) / copies
            if axes:
                comm.all_reduce(values, group=mesh.group(*axes))
            found.update(zip(names, values.tolist(), strict=True))
        return found

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(
            count, dtype=torch.float64, device=self._ctx.accelerator.current_device()
        )
