"""What a rank has of one parameter under the core's `Replicated`: all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_access.param_shard import ParamShard
from ds_core.partition import GradState

if TYPE_CHECKING:
    from ds_core.partition import Replicated


class ReplicatedShard(ParamShard):
    """A parameter of `Replicated`: every rank holds all of it."""

    partitions_weights = local = False

    def __init__(self, owner: Replicated, slot: Any) -> None:
        mesh = owner.ctx.mesh
        axes = slot.info.replicas
        self._owner = owner
        self._slot = slot
        self.name = slot.info.name
        self.shape = tuple(slot.param.shape)
        self.param = slot.param
        self.updated = slot.master
        self.group = mesh.group(*axes)
        self.ranks = mesh.ranks(*axes)
        self.index = mesh.index(*axes)
        self.ranges = self.updated_ranges = [(0, slot.param.numel())] * len(self.ranks)
        self.device = slot.param.device
        self._lone = len(self.ranks) == 1

    def round(self) -> None:
        """See `ParamShard.round`."""
        if self.updated is not self.param:
            self.param.copy_(self.updated)

    def set_weight(self, master: Tensor) -> None:
        """See `ParamShard.set_weight`."""
        self.param.copy_(master)

    @property
    def window_open(self) -> bool:
        """See `ParamShard.window_open`."""
        return any(s.gradient is not None for s in self._owner.slots.values())

    @property
    def grad_dtype(self) -> torch.dtype:
        """See `ParamShard.grad_dtype`."""
        accumulate = self._owner.ctx.precision.accumulate
        return (
            accumulate
            if accumulate is not None and self.param.is_floating_point()
            else self.param.dtype
        )

    @property
    def _factor(self) -> float:
        """What the step will still multiply what this rank holds by, once that is the average over
        replicas.
        """
        return float(self._slot.weight)

    def _held(self) -> Tensor | None:
        grad = self._slot.gradient
        return (
            None
            if grad is None
            else (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)
        )

    def reduced(self) -> Tensor | None:
        """See `ParamShard.reduced`."""
        grad = None if self.has_pending else self._held()
        return grad if grad is None or self._factor == 1.0 else grad * self._factor

    @property
    def has_pending(self) -> bool:
        """See `ParamShard.has_pending`."""
        final = self._lone or self._owner.grad_state is GradState.REDUCED
        return not final and self._slot.gradient is not None

    def pending(self) -> Tensor | None:
        """See `ParamShard.pending`."""
        grad = self._held() if self.has_pending else None
        return None if grad is None else grad / self._owner.ctx.mesh.size("dp")

    def set_grad(self, values: Tensor) -> None:
        """See `ParamShard.set_grad`."""
        values = (values / self._factor).view(self.shape)
        total = self._slot.total
        if self.grad_dtype != self.param.dtype:
            total = self._slot.total = (
                torch.empty_like(self.param, dtype=self.grad_dtype) if total is None else total
            )
            total.copy_(values)
            return
        if self.param.grad is None or self.param.grad.is_sparse:
            self.param.grad = torch.empty_like(self.param)
        self.param.grad.copy_(values)
