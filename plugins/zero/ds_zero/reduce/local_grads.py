"""Gradients where dp has one rank: they stay in ``param.grad``, and the optimizer gets views of
them.

Nothing is reduced then, so neither flat buffers nor flags are needed, and autograd adds up what
micro-batches, nested backwards and shared weights give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ds_core.partition import GradGroup
from ds_zero.reduce.source import GradientSource

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_zero.buckets.flat import FlatBucket


class LocalGradients(GradientSource):
    """See the module's docstring."""

    local = True

    @classmethod
    def suits(cls, ctx: Context, buckets: Sequence[FlatBucket]) -> bool:
        """Whether gradients of `buckets` can stay where autograd leaves them."""
        accumulate = ctx.precision.accumulate
        return (
            ctx.mesh.size("dp") == 1
            and ctx.grain == "element"
            and all(b.masters.store is None and b.weights.on_host is None for b in buckets)
            # A gradient can stay in param.grad only where it accumulates in the parameter's dtype.
            and all(accumulate in (None, b.dtype) for b in buckets)
        )

    @torch.no_grad()
    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """See `GradientSource.add`."""
        if param not in self._params:
            return
        if param.grad is None:
            param.grad = grad.clone()
        else:
            param.grad += grad

    @torch.no_grad()
    def gradients(self) -> list[GradGroup]:
        """See `GradientSource.gradients`."""
        self.refuse_unused([p.grad is not None for p in b.params] for b in self.buckets)
        return self.grouped([_flat(p.grad) for p in b.params] for b in self.buckets)

    def used(self, bucket: FlatBucket) -> bool:
        """See `GradientSource.used`."""
        return any(p.grad is not None for p in bucket.params)

    @property
    def any_gradient(self) -> bool:
        """See `GradientSource.any_gradient`."""
        return any(self.used(b) for b in self.buckets)

    def tensors(self, bucket: FlatBucket, *, reduced: bool) -> Iterable[Tensor | None]:
        """See `GradientSource.tensors`."""
        return [p.grad for p in bucket.params] if reduced else []

    def zero_grad(self) -> None:
        """See `GradientSource.zero_grad`."""
        self.given = []
        for bucket in self.buckets:
            for fragment in bucket.masters.fragments:
                fragment.master.grad = fragment.param.grad = None


def _flat(grad: Tensor | None) -> Tensor | None:
    """The gradient as the optimizer gets it, flat: a view where strides allow."""
    if grad is None or not grad.numel():
        return None
    return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
