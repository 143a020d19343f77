"""What a rank holds of one parameter's states: the contract by which `ds_core.access` looks into any partitioner.

A partitioner answers `Partitioner.locate` with a `Holding`. It says which range of the (row-major flattened) parameter
is whose, and gives this rank's own; whatever needs other ranks is done once, in `ds_core.access`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

__all__ = ["Holding", "Ranges"]

Ranges = Sequence[tuple[int, int]]


class Holding(ABC):
    """This rank's ranges of the states of one parameter that an optimizer updates.

    name, shape: the parameter's, whole. param: the module's parameter. updated: what the optimizer updates for it here.
    group, ranks: who holds its other ranges, or copies. ranges: per rank of the group, in its order, [start, stop) of
    the gradient, and of the weight where that is `local`; updated_ranges: of the master weight and the optimizer's
    states. index: this rank's place. partitions_weights: whether the partitioner lets weights live in ranges; local:
    whether this one does. device: where whole tensors shall be, and where collectives take them.
    """

    name: str
    shape: tuple[int, ...]
    param: nn.Parameter
    updated: nn.Parameter
    group: ProcessGroup
    ranks: Sequence[int]
    ranges: Ranges
    updated_ranges: Ranges
    index: int
    partitions_weights: bool
    local: bool
    device: torch.device

    @property
    def numel(self) -> int:
        """Elements of the whole parameter (a partitioned one may be empty now)."""
        return torch.Size(self.shape).numel()

    def copied(self, ranges: Ranges) -> bool:
        """Whether `ranges` say that every rank holds everything."""
        return all(r == (0, self.numel) for r in ranges)

    def read(self, tensor: Tensor) -> Tensor:
        """The values of a tensor that the optimizer updates or keeps, wherever they are; not to be written to."""
        return tensor.detach()

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Give such a tensor other values, of as many elements."""
        tensor.detach().copy_(values.view(tensor.shape))

    # -- weights ---------------------------------------------------------------------------------------------

    @abstractmethod
    def round(self) -> None:
        """Write this rank's range of the weight from `updated`, whose range it is, too."""

    @abstractmethod
    def set_weight(self, master: Tensor) -> None:
        """Write the weight, rounded from the whole `master`, in this rank's range and wherever it is whole here now."""

    # -- gradients -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def window_open(self) -> bool:
        """Whether any parameter of the same partitioner has a gradient now."""

    @property
    @abstractmethod
    def grad_dtype(self) -> torch.dtype:
        """In which gradients accumulate."""

    @abstractmethod
    def reduced(self) -> Tensor | None:
        """This rank's range, flat, of what was reduced since the last step; None: nothing."""

    @property
    @abstractmethod
    def has_pending(self) -> bool:
        """Whether this rank has a gradient of which other ranks do not know yet."""

    @abstractmethod
    def pending(self) -> Tensor | None:
        """That gradient, whole and flat; None: there is none.

        It is scaled so that the sum over the group is what reduction will add to `reduced`. A fresh tensor.
        """

    @abstractmethod
    def set_grad(self, values: Tensor) -> None:
        """Make `values` (this rank's range, flat) the gradient so far; what is pending is dropped.

        Called on all ranks of the group.
        """
