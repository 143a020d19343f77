"""Data parallelism for optimizers that reduce gradients by themselves, such as the 1-bit family.

Such an optimizer says before each backward whether it wants the average over ranks, which is then taken as always,
overlapped with backward, or each rank's own gradient. In the latter case ranks see different gradients: the global
norm is then the root of the mean square of theirs, and all ranks still skip or clip alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from ds_core.comm import ALONE
from ds_core.errors import UsageError
from ds_core.params import GradGroup
from ds_core.partition import StateSource, StateTensor
from ds_core.replicated import Replicated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from ds_core.context import Context

__all__ = ["CommunicatingOptimizer", "SelfReduced"]


@runtime_checkable
class CommunicatingOptimizer(Protocol):
    """What an optimizer offers that is declared with ``communicates=True``, besides being a torch optimizer."""

    @property
    def takes_averages(self) -> bool:
        """Whether the next step wants gradients that are averaged over ranks. The same on all ranks."""

    def connect(self, group_of: Callable[[Tensor], ProcessGroup | None]) -> None:
        """Called once: `group_of` gives the ranks that hold the same as this one of what it updates."""

    def synchronize(self) -> None:
        """Make weights and states equal on all ranks, where they are not. Collective."""

    def loaded(self) -> None:
        """Its states have been replaced by those of a checkpoint."""


class SelfReduced(Replicated):
    """`Replicated`, where the optimizer decides whether gradients are averaged before it sees them."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._optimizer: CommunicatingOptimizer | None = None

    def meet(self, optimizer: Any) -> None:
        """Be told of the optimizer, once it is built. Raises UsageError for one that lacks the protocol."""
        if not isinstance(optimizer, CommunicatingOptimizer):
            raise UsageError(
                f"{type(optimizer).__name__} is declared as communicating by itself, but has not all of "
                "takes_averages, connect, synchronize and loaded (ds_core.communicating.CommunicatingOptimizer)"
            )
        groups = {s.master: self.ctx.mesh.group(*self._replicas(s)) for s in self._slots}
        optimizer.connect(lambda tensor: groups.get(tensor, ALONE))  # type: ignore[call-overload]
        self._optimizer = optimizer

    @property
    def averages(self) -> bool:
        """See `Replicated.averages`."""
        return self._optimizer is None or self._optimizer.takes_averages

    def gradients(self) -> Sequence[GradGroup]:
        """See `Partitioner.gradients`."""
        groups = super().gradients()
        world = self.ctx.mesh.size("dp")
        if self.averages or world == 1:
            return groups
        by_place: dict[tuple[tuple[str, ...], int], list[Tensor]] = {}
        for place, (slot, grad) in enumerate(zip(self._slots, self._given, strict=True)):
            if grad is not None:
                axes = self._replicas(slot)
                copies = len(self.ctx.mesh.ranks(*axes))
                if 1 < copies < world:  # the mean over fewer ranks than dp has, as its average would have counted it
                    grad = self._given[place] = self.weighted(slot.master, grad, copies / world)
                by_place.setdefault(((*slot.held, *axes), copies), []).append(grad)
        return [GradGroup(axes, t, 1.0 / n) for (axes, n), t in by_place.items()] or [GradGroup((), [])]

    def axes(self) -> Iterable[tuple[str, ...]]:
        """See `Partitioner.axes`."""
        return {*super().axes(), *(self.ctx.mesh.expand((*s.held, *self._replicas(s))) for s in self._slots)}

    def states(self, optimizer: Optimizer | None) -> Iterable[StateTensor]:
        """See `Partitioner.states`; ranks that have gone their own way are brought together first."""
        if self._optimizer is not None:
            self._optimizer.synchronize()
        return super().states(optimizer)

    def load_states(self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True) -> None:
        """See `Partitioner.load_states`."""
        super().load_states(source, optimizer, strict=strict)
        if self._optimizer is not None:
            self._optimizer.loaded()
