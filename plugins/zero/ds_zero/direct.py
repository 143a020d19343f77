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
        self._given: list[Tensor] = []
        self._pairs: dict[FlatBucket, list[tuple[nn.Parameter, nn.Parameter]]] = {
            b: [(p.param, p.master) for p in b.pieces] for b in buckets
        }
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
        for bucket, pairs in self._pairs.items():
            found = by_axes.setdefault(self._axes[bucket], [])
            give = _cast if bucket.master.dtype != bucket.dtype else _flat
            found += give(bucket, pairs)
        self._given = [t for tensors in by_axes.values() for t in tensors]
        return [GradGroup(axes, tensors) for axes, tensors in by_axes.items()] or [GradGroup((), [])]

    def scale(self, factor: float) -> None:
        """See `Reducer.scale`."""
        if self._given:
            torch._foreach_mul_(self._given, factor)

    def used(self, bucket: FlatBucket) -> bool:
        """See `Reducer.used`; asked between `gradients` and `zero_grad`."""
        return any(p.master.grad is not None for p in bucket.pieces)

    def zero_grad(self) -> None:
        """See `Reducer.zero_grad`."""
        self._given = []
        super().zero_grad()


_Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]


def _flat(bucket: FlatBucket, pairs: _Pairs) -> list[Tensor]:
    """Give every master its parameter's gradient, as a view where strides allow."""
    found = []
    for param, master in pairs:
        grad = param.grad
        if grad is None or not grad.numel():
            master.grad = None
            continue
        master.grad = flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
        found.append(flat)
    return found


def _cast(bucket: FlatBucket, pairs: _Pairs) -> list[Tensor]:
    """The same in the masters' dtype, in one new buffer."""
    into, grads = [], []
    for (param, master), view in zip(pairs, torch.empty_like(bucket.master).split(bucket.layout.sizes), strict=True):
        grad = param.grad
        if grad is None or not grad.numel():
            master.grad = None
            continue
        grads.append((grad.to_dense() if grad.is_sparse else grad).reshape(-1))
        into.append(view)
        master.grad = view
    if into:
        torch._foreach_copy_(into, grads)
    return into
