"""How the optimizer's updates of one partitioner are carried out: at the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ds_core.partition import Stepper
from ds_zero.offload.tiled_step import Round, step

if TYPE_CHECKING:
    from ds_run_state.states import StateSource
    from torch.optim import Optimizer

    from ds_core.partition import BackwardPlan
    from ds_zero.base import ZeroPartitioner
    from ds_zero.buckets.flat import FlatBucket


class Updates:
    """Updates in `step`.

    A subclass may begin earlier (see `Reducer.on_reduced`) or end later; then it keeps `settle`.

    `ZeroPartitioner` calls these methods, on its own thread.
    """

    def __init__(self, owner: ZeroPartitioner) -> None:
        self.owner = owner
        self._stepper: Stepper | None = None
        # Of an optimizer that communicates, where a store frees memory: see `agree_on_rounds`.
        self.rounds: list[Round] | None = None

    def bind(self, optimizer: Optimizer) -> None:
        """The optimizer is there. Raises UsageError for one that will not do."""

    def begin(self, plan: BackwardPlan) -> None:
        """A backward begins."""

    def step(self, optimizer: Optimizer, factor: float) -> None:
        """See `Partitioner.step`; gradients are what `GradientSource.given` has."""
        self.update(optimizer, self.owner.reducer.given, factor)

    def update(self, optimizer: Optimizer, grads: Sequence[Tensor | None], factor: float) -> None:
        """Update from these gradients, one for each of all buckets' fragments; None:
        leave it.
        """
        step(self, optimizer, grads, factor)

    @property
    def stepper(self) -> Stepper:
        """The stepper of this rank's masters, in the order of the reducer's buckets."""
        if self._stepper is None:
            buckets = self.owner.reducer.buckets
            copies = [copy for b in buckets for copy in b.masters.targets()]
            masters = [p.master for b in buckets for p in b.masters.fragments]
            # A master whose memory is freed cannot be copied.
            in_memory = all(b.masters.evicts is None for b in buckets)
            self._stepper = Stepper(masters, copies, every=in_memory)
        return self._stepper

    def changed(self, bucket: FlatBucket) -> bool:
        """Whether the step has changed weights of `bucket`, on any rank; called before gradients
        are dropped.
        """
        return self.owner.reducer.used(bucket)

    def loaded(self, source: StateSource, optimizer: Optimizer | None) -> None:
        """Masters, and the optimizer's states unless it is None, were read from `source`, after
        `settle`.
        """

    def settle(self) -> None:
        """Others will read or write masters, states or gradients: they must be as `step` has left
        them.
        """

    def drop(self) -> None:
        """Gradients are dropped, after a step or instead of one."""
        if self._stepper is not None:
            self._stepper.release()

    def close(self) -> None:
        """The engine ends."""
