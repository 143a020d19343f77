"""Data parallelism for optimizers that reduce gradients by themselves.

Before each backward the optimizer says whether it wants the average over ranks, which is then taken
as usual, overlapped with backward, or each rank's own gradient. In the latter case ranks see
different gradients: the global norm is then the root mean square of theirs, and all ranks still
skip a step or clip alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ds_run_state.states import ReplicatedStates, StateSource, StateTensor
from torch import Tensor

from ds_core.comm import ALONE
from ds_core.errors import UsageError
from ds_core.partition import GradGroup, Partitioner, Replicated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.partition import ParamInfo


@runtime_checkable
class ReducingOptimizer(Protocol):
    """The interface of an optimizer for `OptimizerReduced`, besides being a torch optimizer."""

    @property
    def takes_averages(self) -> bool:
        """Whether the next step wants gradients that are averaged over ranks.

        The same on all ranks.
        """

    def connect(self, group_of: Callable[[Tensor], ProcessGroup | None]) -> None:
        """Called once: `group_of` gives the group of ranks that have replicas of a tensor which it
        updates.
        """

    def synchronize(self) -> None:
        """Make weights and states equal on all ranks, where they are not. Collective."""

    def loaded(self) -> None:
        """Its states have been replaced by those of a checkpoint."""


class OptimizerReduced(Replicated):
    """`Replicated`, where the optimizer decides whether gradients are averaged before it sees
    them."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._optimizer: ReducingOptimizer | None = None

    def bind(self, optimizer: Any) -> None:
        """See `Partitioner.bind`.

        Raises UsageError for an optimizer that is no `ReducingOptimizer`.
        """
        if not isinstance(optimizer, ReducingOptimizer):
            raise UsageError(
                f"{type(optimizer).__name__} is declared to reduce gradients by itself, but lacks "
                "one of takes_averages, connect, synchronize and loaded "
                "(ds_optimizers.onebit.partitioner.ReducingOptimizer)"
            )
        groups = {master: self.ctx.mesh.group(*info.replicas) for info, master in self._masters()}
        optimizer.connect(lambda tensor: groups.get(tensor, ALONE))
        self._optimizer = optimizer

    def _masters(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        return ((slot.info, slot.master) for slot in self.slots.values())

    # The gradients of a rank may be its own, not reduced ones: none to be shown as shards.
    gradient_shards = Partitioner.gradient_shards

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
        # Gradients that differ among replicas: squares are summed over them too, and divided by
        # their number.
        by_layout: dict[tuple[tuple[str, ...], int], list[Tensor]] = {}
        for grad, (info, _) in zip(self.given, self._masters(), strict=True):
            if grad is None:
                continue
            replicas = len(self.ctx.mesh.ranks(*info.replicas))
            by_layout.setdefault(((*info.held, *info.replicas), replicas), []).append(grad)
        return [GradGroup(axes, grads, 1.0 / n) for (axes, n), grads in by_layout.items()] or [
            GradGroup((), [])
        ]

    def axes(self) -> Iterable[tuple[str, ...]]:
        """See `Partitioner.axes`."""
        return {
            *super().axes(),
            *(self.ctx.mesh.expand((*i.held, *i.replicas)) for i, _ in self._masters()),
        }

    def states(self, optimizer: Optimizer | None) -> Iterable[StateTensor]:
        """See `HasStates.states`; ranks whose weights and states differ are made equal first."""
        if self._optimizer is not None:
            self._optimizer.synchronize()
        return ReplicatedStates(self).states(optimizer)

    def load_states(
        self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True
    ) -> None:
        """See `HasStates.load_states`."""
        ReplicatedStates(self).load_states(source, optimizer, strict=strict)
        if self._optimizer is not None:
            self._optimizer.loaded()
