"""Data parallelism in which gradients of embeddings are reduced by rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.gradients import Bucket, averaging_factors, wire_dtype
from ds_core.partition import Replicated
from ds_sparse_gradients.rows import gather_rows, used_rows

_NO_GRADIENT = -1
"""Instead of a number of rows: this rank has no gradient, which is another thing than one of zeros.
"""


class RowBucket(Bucket):
    """The gradient of one embedding, reduced by rows where that sends less than all of them.

    While backward goes on ranks only exchange how many rows they have. All know all counts then,
    and decide alike: the rows of each are gathered and added up, or, where they would be as many as
    the matrix has, the whole is reduced.
    """

    def __init__(
        self,
        param: nn.Parameter,
        dtype: torch.dtype,
        group: Any,
        factors: tuple[float, float],
        about: str,
    ):
        super().__init__([param], dtype, group, *factors, about)
        # Rows of each rank, exchanged while backward goes on; then the gradient and its rows.
        self._counts = torch.zeros(comm.world_size(group), dtype=torch.int64, device=param.device)
        self._grad: Tensor | None = None
        self._used: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def launch(self, grads: Sequence[Tensor | None]) -> None:
        """See `Bucket.launch`."""
        (self._grad,) = grads
        count = _NO_GRADIENT
        self._used = None
        if self._grad is not None:
            # Copies of the rows: the gradient may be the buffer into which the sum is written.
            self._used = used_rows(self._grad)
            count = len(self._used[0])
        own = torch.tensor([count], dtype=torch.int64, device=self._counts.device)
        comm.label(f"rows of {self._about}")
        self._work = comm.all_gather_into_tensor(self._counts, own, self._group, async_op=True)

    @torch.no_grad()
    def collect(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `Bucket.collect`. Collective."""
        self.settle()
        counts = self._counts.tolist()
        (param,) = self.params
        (total,) = self._views
        grad = self._grad
        used = self._used
        self._grad = self._used = None
        if max(counts) == _NO_GRADIENT:
            return iter(())
        # As many rows as the matrix has, or more: an ordinary all-reduce sends less.
        if max(counts) * len(counts) >= param.shape[0]:
            super().launch([grad])
            return super().collect()
        if used is None:
            nothing = torch.zeros(0, dtype=torch.int64, device=param.device)
            used = nothing, total.new_zeros(0, *param.shape[1:])
        numbers, rows = used
        # The dtype and factors of the collective, as `Bucket` applies them to a full gradient.
        rows = rows.to(total.dtype) * self._before
        total.zero_()
        comm.label(self._about)
        for theirs, their_rows in gather_rows(numbers, rows, counts, self._group):
            # Rank by rank, so that all ranks add in one order: a number occurs once in those of a
            # rank.
            total.index_add_(0, theirs, their_rows)
        if self._after != 1.0:
            total.mul_(self._after)
        return iter([(param, total)])


class ReducedByRows(Replicated):
    """`Replicated`, with a `RowBucket` for the weight of each embedding."""

    def make_buckets(self, params: Sequence[nn.Parameter]) -> list[Bucket]:
        """See `Replicated.make_buckets`: embeddings come last, as their gradients do."""
        tables = embeddings(self.module)
        rest = super().make_buckets([p for p in params if p not in tables])
        return rest + [
            self._by_rows(p) for p in params if p in tables and self.ctx.params[p].replicas
        ]

    def _by_rows(self, param: nn.Parameter) -> RowBucket:
        info = self.ctx.params[param]
        mesh = self.ctx.mesh
        factors = averaging_factors(self.ctx, mesh.size(*info.replicas))
        group = mesh.group(*info.replicas)
        return RowBucket(
            param, wire_dtype(param, self.ctx), group, factors, f"gradient of {info.name!r}"
        )


def embeddings(module: nn.Module) -> set[nn.Parameter]:
    """Weights that only embeddings have: one that an output layer shares has gradients in all
    rows."""
    tables: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for part in module.modules():
        own = set(part.parameters(recurse=False))
        (tables if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else others).update(own)
    return tables - others
