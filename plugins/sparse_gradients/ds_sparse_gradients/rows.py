"""Rows of a matrix, and the exchange of rows between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def used_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the rows of `grad` that are not zero, each once, and the rows."""
    # coalesce adds up rows that occur several times: each number once.
    if grad.is_sparse:
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    numbers = grad.flatten(1).any(dim=1).nonzero()[:, 0]
    return numbers, grad.index_select(0, numbers)


def gather_rows(
    numbers: Tensor, rows: Tensor, counts: list[int], group: ProcessGroup | None
) -> list[tuple[Tensor, Tensor]]:
    """The (numbers, rows) of each rank of `group`, which has ``counts[rank]`` rows. Collective."""
    most = max(counts)
    ranks = len(counts)
    own = numbers.shape[0]
    if most == 0:
        return []
    # Collectives take equal lengths: shorter ones are padded, and what pads is cut off again.
    padded = numbers.new_zeros(most)
    padded[:own] = numbers
    values = rows.new_zeros(most, *rows.shape[1:])
    values[:own] = rows
    all_numbers = numbers.new_empty(ranks, most)
    all_values = rows.new_empty(ranks, *values.shape)
    comm.all_gather_into_tensor(all_numbers, padded, group)
    comm.all_gather_into_tensor(all_values, values, group)
    return [(all_numbers[rank, :n], all_values[rank, :n]) for rank, n in enumerate(counts) if n > 0]


class RowTensor:
    """A gradient of an embedding as numbers of rows and rows, as DeepSpeed's ``SparseTensor``.

    dense: a gradient, sparse (``nn.Embedding(sparse=True)``) or dense; None makes an empty one to
    be filled in.
    """

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: Any = None
        self.values: Any = None
        self.dense_size: list[int] | None = None
        if dense_tensor is not None:
            self.indices, self.values = used_rows(dense_tensor)
            self.dense_size = list(dense_tensor.shape)
            self.dtype = dense_tensor.dtype
            self.is_sparse = dense_tensor.is_sparse

    @staticmethod
    def type() -> str:
        """DeepSpeed's name of the class."""
        return "deepspeed.SparseTensor"

    def to_coo_tensor(self) -> Tensor:
        """As a sparse tensor of torch's."""
        return torch.sparse_coo_tensor(
            self.indices.unsqueeze(0), self.values, self.dense_size, check_invariants=True
        )

    def to_dense(self) -> Tensor:
        """As an ordinary tensor; rows of one number are added up."""
        return self.to_coo_tensor().to_dense()

    def sparse_size(self) -> tuple[int, int]:
        """Numbers that are held, and that the whole matrix has."""
        assert self.dense_size is not None
        return self.indices.numel() + self.values.numel(), torch.Size(self.dense_size).numel()

    def add(self, b: RowTensor) -> None:
        """Add `b`, of the same shape."""
        if self.dense_size != b.dense_size:
            raise ValueError(
                f"a RowTensor of {self.dense_size} and one of {b.dense_size} cannot be added"
            )
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])

    def __repr__(self) -> str:
        held, whole = self.sparse_size()
        return (
            f"RowTensor(rows={len(self.indices)}, shape={self.dense_size}, "
            f"reduction_factor={whole / held:.3g})"
        )
