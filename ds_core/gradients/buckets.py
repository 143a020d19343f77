"""Gradient buckets: many small gradients reduced as one flat buffer, in the background.

The flat buffer ends with one flag per parameter ("this rank has a gradient for it"), which the same
reduction sums. So ranks agree on which parameters no rank used, and those keep ``grad=None`` as in
one-process torch, at no extra collective; the flags are only looked at when this rank lacks a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.precision import WIRE_DTYPES

if TYPE_CHECKING:
    from ds_core.context import Context

K = TypeVar("K", bound=Hashable)

BUCKET_BYTES = 25 * 2**20
"""Large enough that a reduction's start-up cost vanishes, small enough to start while backward
still runs.
"""

FIRST_BYTES = 2**20
"""Of the first bucket of a kind, as a link between hosts is idle until it is complete; each may
have `GROWTH` times the bytes of the one before."""

GROWTH = 4


class Bucket:
    """Parameters of one wire dtype, device and replica group, whose gradients are reduced
    together."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: Any,
        before: float,
        after: float,
        about: str,
    ) -> None:
        self.params = list(params)
        # The parameters whose gradients have arrived in the running backward.
        self.arrived: set[Tensor] = set()
        self._group = group
        # The purpose of its reductions, as the label that interceptors are given.
        self._about = about
        # Factors before and after the sum over ranks.
        self._before = before
        self._after = after
        # Gradients, then one flag for each of them.
        sizes = [p.numel() for p in params]
        self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=params[0].device)
        *pieces, self._flags = self._flat.split([*sizes, len(sizes)])
        self._views = [_shaped_like(p, v) for p, v in zip(params, pieces, strict=True)]
        # Whether this rank had a gradient for it, by parameter.
        self._have: list[bool] = []
        self._work: Any = None

    @property
    def complete(self) -> bool:
        """Whether every parameter's gradient is there."""
        return len(self.arrived) >= len(self.params)

    def settle(self) -> None:
        """Be ready for a new backward; a reduction that an interrupted one left behind is waited
        for.
        """
        self.arrived.clear()
        if self._work is not None:
            self._work.wait()
            self._work = None

    @torch.no_grad()
    def launch(self, grads: Sequence[Tensor | None]) -> None:
        """Start reducing `grads` (one per parameter; None counts as zeros)."""
        self._have = [g is not None for g in grads]
        self._flags.fill_(1.0)
        into = []
        given = []
        for i, (view, grad) in enumerate(zip(self._views, grads, strict=True)):
            if grad is None:
                view.zero_()
                self._flags[i] = 0.0
            elif grad.is_sparse:
                view.copy_(grad.to_dense())
            # After the last reduction ``param.grad`` may be this very view.
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
        """Wait; then each parameter that any rank had a gradient for, with the reduced gradient (a
        live view).
        """
        self.settle()
        used = [True] * len(self.params)
        # Reading flags waits for the device; a gradient of this rank's answers without them.
        if not all(self._have):
            used = [
                have or flag > 0
                for have, flag in zip(self._have, self._flags.tolist(), strict=True)
            ]
        if self._after != 1.0:
            self._flat.mul_(self._after)
        return ((p, v) for p, v, u in zip(self.params, self._views, used, strict=True) if u)


def _shaped_like(param: nn.Parameter, flat: Tensor) -> Tensor:
    """`flat` as a tensor of the parameter's shape *and strides*: fused optimizers index memory, not
    dimensions.
    """
    dense = (
        sum((s - 1) * t for s, t in zip(param.shape, param.stride(), strict=True)) + 1
        == param.numel()
    )
    if param.is_contiguous() or not dense:
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset())


def make_buckets(params: Sequence[nn.Parameter], ctx: Context) -> list[Bucket]:
    """The buckets of those of `params` that have replicas, in about the order in which backward
    finishes them.
    """
    place = {p: i for i, p in enumerate(params)}

    # What must be equal in one buffer.
    def kind(param: nn.Parameter) -> tuple[tuple[str, ...], torch.dtype, torch.device]:
        return ctx.params[param].replicas, wire_dtype(param, ctx), param.device

    def bucket(run: list[nn.Parameter]) -> Bucket:
        axes, dtype, _ = kind(run[0])
        about = f"gradients of {ctx.params[run[0]].name!r} to {ctx.params[run[-1]].name!r}"
        before, after = averaging_factors(ctx, ctx.mesh.size(*axes))
        return Bucket(run, dtype, ctx.mesh.group(*axes), before, after, about)

    most: dict[Hashable, int] = {}

    def full(key: Any, filled: int, size: int) -> bool:
        limit = most.setdefault(key, min(FIRST_BYTES, BUCKET_BYTES))
        if filled * key[1].itemsize < limit:
            return False
        most[key] = min(limit * GROWTH, BUCKET_BYTES)
        return True

    shared = [p for p in params if ctx.params[p].replicas]
    runs = arrange(shared, kind, full)
    # A bucket is complete when its earliest parameter is, which backward finishes last.
    return [bucket(run) for run in sorted(runs, key=lambda run: -place[run[-1]])]


def averaging_factors(ctx: Context, ranks: int) -> tuple[float, float]:
    """What gradients are multiplied by before and after they are summed over ranks; the product is
    1 / `ranks`.
    """
    core = ctx.config.core
    if core.prescale_gradients:
        return 1.0 / ranks, 1.0
    return 1.0 / core.gradient_predivide_factor, core.gradient_predivide_factor / ranks


def wire_dtype(param: nn.Parameter, ctx: Context) -> torch.dtype:
    """The dtype in which the gradient of `param` is reduced."""
    return (ctx.stash.get(WIRE_DTYPES) or {}).get(param) or ctx.precision.wire or param.dtype


def arrange(
    params: Sequence[nn.Parameter],
    kind: Callable[[nn.Parameter], K],
    full: Callable[[K, int, int], bool],
) -> list[list[nn.Parameter]]:
    """Which parameters share a buffer: runs of one kind, in reverse order, about that in which
    backward finishes them.

    kind: what must be the same in a buffer.
    full: kind, elements in the buffer, elements of the next parameter -> whether that one begins a
        new buffer.
    """
    runs: dict[K, list[list[nn.Parameter]]] = {}
    filled: dict[K, int] = {}
    for param in reversed(params):
        key = kind(param)
        size = param.numel()
        if key not in runs or full(key, filled[key], size):
            runs.setdefault(key, []).append([])
            filled[key] = 0
        runs[key][-1].append(param)
        filled[key] += size
    return [run for members in runs.values() for run in members]
