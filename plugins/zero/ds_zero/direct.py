"""Gradients where dp has one rank: they stay in ``param.grad``, and the optimizer gets views of them.

Nothing is reduced then, so neither flat buffers nor flags are needed, and autograd adds up what micro-batches, nested
backwards and shared weights give. Hooks are there only where it matters which backward a gradient came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.params import GradGroup
from ds_core.partition import origin_matters
from ds_core.process import STATE
from ds_zero.grads import Reducer

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_zero.config import ZeroConfig
    from ds_zero.flat import FlatBucket

__all__ = ["DirectReducer", "make_reducer"]


def make_reducer(
    ctx: Context,
    section: ZeroConfig,
    buckets: Sequence[FlatBucket],
    groups: Callable[[FlatBucket], Any],
    order: Callable[[], Sequence[FlatBucket]] | None = None,
) -> Reducer:
    """The reducer for these buckets: see `Reducer` for the arguments."""
    accumulate = ctx.precision.accumulate
    direct = (
        ctx.mesh.size("dp") == 1
        and ctx.grain == "element"
        and not any(b.part_rests or b.master_rests or b.host_steps for b in buckets)
        # A gradient can stay in param.grad only where it accumulates in the parameter's own dtype.
        and all(accumulate in (None, b.dtype) for b in buckets)
    )
    return (DirectReducer if direct else Reducer)(ctx, section, buckets, groups, order)


class DirectReducer(Reducer):
    """See the module's docstring."""

    direct = True

    def __init__(self, ctx: Context, section: ZeroConfig, buckets: Sequence[FlatBucket], *rest: Any) -> None:
        super().__init__(ctx, section, buckets, *rest)
        self._axes = {b: ctx.mesh.expand((*b.held, *b.axes)) for b in buckets}

    def _install_hooks(self) -> None:
        """While backward runs, at most `note_other_driver` has to be called."""
        for hook in self._hooks:
            hook.remove()
        self._trainable = [p.requires_grad for p in self._place]
        watched = [p for p in self._place if p.requires_grad and origin_matters(self.ctx)]
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in watched]
        for grads in self._all.values():
            grads.awaited = len(grads.bucket.params)  # a parameter may be frozen when it has its gradient

    def rewatch(self) -> None:
        """See `Reducer.rewatch`."""
        self._install_hooks()

    def _on_gradient(self, param: Tensor) -> None:
        """Runs inside backward when the gradient of `param` is complete."""
        if STATE.driver is not self.owner and self.owner is not None:
            self.owner.note_other_driver()

    def begin(self) -> None:
        """See `Reducer.begin`; parameters may have been frozen or thawed since the last."""
        if self._hooks and self._trainable != [p.requires_grad for p in self._place]:
            self._install_hooks()

    @torch.no_grad()
    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """See `Reducer.add`."""
        if param in self._place:
            if param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad += grad

    def finish(self) -> None:
        """See `Reducer.finish`: every gradient is final as it is."""

    @torch.no_grad()
    def gradients(self) -> list[GradGroup]:
        """See `Reducer.gradients`."""
        if not self.section.ignore_unused_parameters:
            for bucket, grads in self._all.items():
                grads.used = [p.grad is not None for p in bucket.params]
            self._refuse_unused()
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        self.given = []
        for bucket, axes in self._axes.items():
            mine = [_flat(param.grad) for param in bucket.params]
            self.given += mine
            found = by_axes.setdefault(axes, [])
            if bucket.counted:
                found += [g for g in mine if g is not None]
        return [GradGroup(axes, tensors) for axes, tensors in by_axes.items()] or [GradGroup((), [])]

    def used(self, bucket: FlatBucket) -> bool:
        """See `Reducer.used`; asked between `gradients` and `zero_grad`."""
        return any(p.grad is not None for p in bucket.params)


def _flat(grad: Tensor | None) -> Tensor | None:
    """The gradient as the optimizer gets it, flat: a view where strides allow."""
    if grad is None or not grad.numel():
        return None
    return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
