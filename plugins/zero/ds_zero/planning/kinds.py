"""Bytes of one rank by kind, which plans add up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kinds:
    """Bytes of one rank, by kind.

    gradients: reduced, from backward to the step. masters: what the optimizer updates, where it is
        a copy.
    cast: gradients in the masters' dtype, during a step of an optimizer that needs it. buckets:
        flat buffers in which gradients are reduced, in backward. gathered: unsharded weights of
        stage 3, the most at a time.
    """

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    states: int = 0
    cast: int = 0
    buckets: int = 0
    gathered: int = 0

    @property
    def resting(self) -> int:
        """Bytes between backward and step."""
        return self.parameters + self.gradients + self.masters + self.states

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return self.resting + max(self.cast, self.buckets + self.gathered)  # step, backward


def join(*kinds: Kinds) -> Kinds:
    """Their sum."""
    return Kinds(*(sum(getattr(k, name) for k in kinds) for name in Kinds.__dataclass_fields__))
