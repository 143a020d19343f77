"""Gradient buckets: many small gradients reduced as one flat buffer, in the background.

The flat buffer ends with one flag per parameter ("this rank has a gradient for it"), which the same reduction sums.
So ranks agree on which parameters nobody used, and those keep ``grad=None`` as in one-process torch, at no extra
collective; the flags are only looked at when this rank lacks a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.precision import WIRE_DTYPES

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["BUCKET_BYTES", "Bucket", "make_buckets"]

BUCKET_BYTES = 25 * 2**20
"""Large enough that a reduction's start-up cost vanishes, small enough to start while backward still runs."""


class Bucket:
    """Parameters of one wire dtype, device and replica group, whose gradients are reduced together."""

    def __init__(
        self, params: Sequence[nn.Parameter], dtype: torch.dtype, group: Any, before: float, after: float, about: str
    ) -> None:
        self.params, self._about = list(params), about
        self.arrived: set[Tensor] = set()
        self._group, self._before, self._after = group, before, after
        sizes = [p.numel() for p in params]
        self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=params[0].device)
        *pieces, self._flags = self._flat.split([*sizes, len(sizes)])
        self._views = [_shaped_like(p, v) for p, v in zip(params, pieces, strict=True)]
        self._have: list[bool] = []
        self._work: Any = None

    @property
    def complete(self) -> bool:
        """Whether every parameter's gradient is there."""
        return len(self.arrived) >= len(self.params)

    def settle(self) -> None:
        """Be ready for a new backward; a reduction that an interrupted one left behind is waited for."""
        self.arrived.clear()
        if self._work is not None:
            self._work.wait()
            self._work = None

    @torch.no_grad()
    def launch(self, grads: Sequence[Tensor | None]) -> None:
        """Start reducing `grads` (one per parameter; None counts as zeros)."""
        self._have = [g is not None for g in grads]
        self._flags.fill_(1.0)
        into, given = [], []
        for i, (view, grad) in enumerate(zip(self._views, grads, strict=True)):
            if grad is None:
                view.zero_()
                self._flags[i] = 0.0
            elif grad.is_sparse:
                view.copy_(grad.to_dense())
            elif grad.data_ptr() != view.data_ptr():
                into.append(view)
                given.append(grad)
        if into:
            torch._foreach_copy_(into, given)
        if self._before != 1.0:
            self._flat.mul_(self._before)
        comm.label(self._about)
        self._work = comm.all_reduce(self._flat, group=self._group, async_op=True)

    def collect(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Wait; then each parameter that any rank had a gradient for, with the reduced gradient (a live view)."""
        self.settle()
        used = [True] * len(self.params)
        if not all(self._have):
            used = [have or flag > 0 for have, flag in zip(self._have, self._flags.tolist(), strict=True)]
        if self._after != 1.0:
            self._flat.mul_(self._after)
        return ((p, v) for p, v, u in zip(self.params, self._views, used, strict=True) if u)


def _shaped_like(param: nn.Parameter, flat: Tensor) -> Tensor:
    """`flat` as a tensor of the parameter's shape *and strides*: fused optimizers index memory, not dimensions."""
    dense = sum((s - 1) * t for s, t in zip(param.shape, param.stride(), strict=True)) + 1 == param.numel()
    if param.is_contiguous() or not dense:
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset())


def make_buckets(params: Sequence[nn.Parameter], ctx: Context) -> list[Bucket]:
    """Lay `params` into buckets in reverse order, which is about the order in which backward finishes them."""
    core, mesh = ctx.config.core, ctx.mesh
    world = mesh.size("dp")
    before = 1.0 / world if core.prescale_gradients else 1.0 / core.gradient_predivide_factor
    after = 1.0 if core.prescale_gradients else core.gradient_predivide_factor / world
    special = ctx.stash.get(WIRE_DTYPES) or {}
    open_: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    buckets = []

    def close(key: tuple[Any, ...]) -> None:
        axes, dtype, _ = key
        members = open_.pop(key)
        about = f"gradients of {ctx.params[members[0]].name!r} to {ctx.params[members[-1]].name!r}"
        buckets.append(Bucket(members, dtype, mesh.group(*axes), before, after, about))

    for param in reversed(params):
        axes = ctx.params[param].replicas
        if not axes:
            continue
        dtype = special.get(param) or ctx.precision.wire or param.dtype
        key = (axes, dtype, param.device)
        open_.setdefault(key, []).append(param)
        if sum(p.numel() for p in open_[key]) * dtype.itemsize >= BUCKET_BYTES:
            close(key)
    for key in list(open_):
        close(key)
    return buckets
