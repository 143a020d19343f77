"""The rows of ``dscore plan``: what one rank holds, by kind and place, and what it sends (torch-free)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields


class Offload(enum.Enum):
    """What is kept in host memory, or on disk."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "optimizer and parameters"
    DISK = "optimizer on disk"
    DISK_ALL = "optimizer and parameters on disk"

    @property
    def weights(self) -> bool:
        """Whether sharded weights are kept there, too."""
        return self in (Offload.ALL, Offload.DISK_ALL)

    @property
    def on_disk(self) -> bool:
        """Whether a store that frees memory has it."""
        return self in (Offload.DISK, Offload.DISK_ALL)


@dataclass(frozen=True, slots=True)
class Kinds:
    """Bytes of one rank in one place, by kind."""

    parameters: int = 0
    """Weights that are kept: full, or this rank's shard."""

    gradients: int = 0
    """Reduced gradients, from backward to the step."""

    masters: int = 0
    """What the optimizer updates, where it is a copy of the weights."""

    states: int = 0
    """The optimizer's states."""

    cast: int = 0
    """Gradients in the masters' dtype, during a step of an optimizer that needs it."""

    buckets: int = 0
    """Flat buffers in which gradients are reduced, in backward."""

    gathered: int = 0
    """Unsharded weights of stage 3, the most at a time."""

    @property
    def resting(self) -> int:
        """Bytes between backward and step."""
        return self.parameters + self.gradients + self.masters + self.states

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        in_step = self.cast
        in_backward = self.buckets + self.gathered
        return self.resting + max(in_step, in_backward)


def join(*kinds: Kinds) -> Kinds:
    """Their sum."""
    return Kinds(*(sum(getattr(k, field.name) for k in kinds) for field in fields(Kinds)))


@dataclass(frozen=True, slots=True)
class Need:
    """The memory and communication of one rank under one stage of ZeRO and one offload.

    ``dscore plan --json`` prints every field.
    """

    stage: int

    offload: Offload

    device: Kinds

    host: Kinds

    reduced: int
    """Elements of gradients that are sent per step."""

    gathered: int
    """Elements of weights that are sent per step."""

    sent: int
    """Bytes of both."""

    link: int
    """Bytes between device and host per step."""

    across: int = 0
    """Bytes of `sent` for ranks of other blocks, where ranks form blocks (hpZ, MiCS)."""

    disk: int = 0
    """Bytes on disk."""
