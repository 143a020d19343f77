"""The shard of one parameter's states that this rank holds: what a partitioner's `locate` returns.

A `ParamShard` says which range of the (row-major flattened) parameter each rank has, and reads and
writes this rank's. Whatever needs other ranks is written once, above this contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

Ranges = Sequence[tuple[int, int]]


class ParamShard(ABC):
    """This rank's ranges of the weight, gradient and optimizer states of one trained parameter."""

    # -- the parameter
    # Of the unsharded one.
    name: str
    shape: tuple[int, ...]
    # The module's, and what the optimizer updates for it on this rank.
    param: nn.Parameter
    updated: nn.Parameter
    # -- who shares it
    # The process group, its global ranks, and this rank's index among them.
    group: ProcessGroup
    ranks: Sequence[int]
    # [start, stop) of the gradient per rank of the group, and of the weight where `local`.
    ranges: Ranges
    # The same for the master weight and the optimizer's states.
    updated_ranges: Ranges
    index: int
    # Whether the partitioner shards weights at all, and whether it shards this one.
    partitions_weights: bool
    local: bool
    # The device of unsharded tensors and of collectives.
    device: torch.device

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter (`param` may be empty now)."""
        return torch.Size(self.shape).numel()

    def copied(self, ranges: Ranges) -> bool:
        """Whether every rank of the group has a full copy according to `ranges`."""
        return all(r == (0, self.numel) for r in ranges)

    def read(self, tensor: Tensor) -> Tensor:
        """The values of `updated` or of an optimizer state, wherever they are stored.

        Do not write to the result.
        """
        return tensor.detach()

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Copy `values`, of as many elements, into `updated` or an optimizer state."""
        tensor.detach().copy_(values.view(tensor.shape))

    # -- weights -----------------------------------------------------------------------------------

    def check_local_write(self) -> None:  # noqa: B027
        """Raise UsageError where other ranks would not see a range of the weight that is written
        here now.
        """

    @abstractmethod
    def round(self) -> None:
        """Write this rank's range of the weight from `updated`, where both have the same range."""

    @abstractmethod
    def set_weight(self, master: Tensor) -> None:
        """Write the weight from the unsharded `master`: this rank's range, and the unsharded copy
        if there is one.
        """

    # -- gradients ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def window_open(self) -> bool:
        """Whether any parameter of this partitioner has a gradient now."""

    @property
    @abstractmethod
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients accumulate."""

    @abstractmethod
    def reduced(self) -> Tensor | None:
        """This rank's range of the gradient reduced since the last step, flat; None if nothing was
        reduced.
        """

    @property
    @abstractmethod
    def has_pending(self) -> bool:
        """Whether this rank has a gradient that is not reduced yet."""

    @abstractmethod
    def pending(self) -> Tensor | None:
        """The gradient that is not reduced yet, unsharded and flat, as a new tensor; None if there
        is none.

        It is scaled so that the sum over the group is what reduction will add to `reduced`.
        """

    @abstractmethod
    def set_grad(self, values: Tensor) -> None:
        """Make `values` (this rank's range, flat) the gradient so far, and drop what is pending.

        All ranks of the group call it.
        """


@runtime_checkable
class LocatesParams(Protocol):
    """A partitioner that lets the states of single parameters be read and set.

    `Replicated` needs no method for it.
    """

    def locate(self, param: nn.Parameter) -> ParamShard | None:
        """What this rank holds of the states of `param`; None when no optimizer updates it here."""


@runtime_checkable
class HasWholeStates(Protocol):
    """An optimizer with states that belong to whole parameters, each on one rank: preconditioners."""

    def whole_state(self, param: Tensor, key: str) -> Tensor | None:
        """State `key` of the parameter of which `param` is what this rank updates; None without one.

        Collective.
        """

    def put_whole_state(self, param: Tensor, key: str, value: Tensor) -> None:
        """Make `value`, of the shape that `whole_state` gives, that state; all ranks give the same."""
