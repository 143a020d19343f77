"""The memory of one bucket on one rank, as the classes of weights and masters answer it for plans.

Nothing here has tensors: `dscore plan` asks the classes, and no bucket is made.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Place(enum.Enum):
    """Where memory is between steps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    """Behind the host: a store that frees memory has it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """One bucket on one rank, as `Weights.memory` and `Masters.memory` count it."""

    # Elements of all ranks, with padding.
    total: int
    # Elements of the shard, with its padding and without.
    shard: int
    own: int

    weight: torch.dtype
    master: torch.dtype
    # The dtype of reduced gradients that wait for the step.
    gradient: torch.dtype

    # Bytes of the optimizer's states per element.
    state_bytes: int
    # Where the shard of the weights is.
    weights: Place

    @property
    def narrow_bytes(self) -> int:
        """Bytes of the shard in the weights' dtype, where masters have another; else 0."""
        return self.shard * self.weight.itemsize if self.master != self.weight else 0


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one bucket on one rank, where its masters are kept."""

    place: Place
    """Where all are but `staged`."""

    masters: int = 0
    """What the optimizer updates, where it is a copy."""

    states: int = 0
    """The optimizer's states."""

    gradients: int = 0
    """Reduced gradients that wait for the step, and are not on the device."""

    cast: int = 0
    """Gradients in the masters' dtype, in a step of an optimizer that needs it."""

    staged: int = 0
    """New weights in host memory, on their way to the device."""

    @property
    def total(self) -> int:
        """What a step brings into memory, where masters are not."""
        return self.masters + self.states + self.gradients


def choose_dtype(weight: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of masters or gradients: `wanted` by the config, but only of floating weights."""
    return wanted if wanted is not None and weight.is_floating_point else weight


def waiting_dtype(
    reduced: torch.dtype, master: torch.dtype, accumulate: torch.dtype | None, *, once: bool
) -> torch.dtype:
    """The dtype in which the first reduced gradients of a step wait on the host.

    reduced, master: the dtypes of the reduction and of masters. accumulate: the dtype that the
    config wants. once: whether a step has one micro-batch.
    """
    # The only one of a step needs no wide sum: half the memory, and no cast.
    return reduced if once and accumulate is None else accumulate or master
