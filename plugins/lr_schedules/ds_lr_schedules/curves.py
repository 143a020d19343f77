"""The schedules as arithmetic: functions of the step index, without an optimizer and without torch.

``t`` is the index of the last step taken: -1 before the first, 0 after it. What depends on integers
only (the place in a cycle, the stair) is computed with integers, so that rounding errors never move
a stair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def range_test(t: int, step_size: int, step_rate: float, staircase: bool) -> float:
    """How much the minimum learning rate is multiplied by: 1 at the start, `step_rate` more every
    `step_size` steps.
    """
    intervals = (t + 1) // step_size if staircase else (t + 1) / step_size
    return 1.0 + step_rate * intervals


def warmup_steps(num_steps: int) -> int:
    """The length of a warm-up that is used: none, or at least 2, since the logarithm of 1 divides
    by zero.
    """
    return max(2, num_steps) if num_steps else 0


def warmup(t: int, num_steps: int, kind: str) -> float:
    """Progress of the warm-up, in [0, 1]; 1 from step `num_steps` on and 0 before the first step;
    without one 1.

    num_steps: as `warmup_steps` gives it.
    kind: ``"log"`` or ``"linear"``.
    """
    if num_steps == 0:
        return 1.0
    if t < 0:
        return 0.0
    if t >= num_steps:
        return 1.0
    # log(t + 1) / log(n): half of the way after sqrt(n) steps.
    return t / num_steps if kind == "linear" else math.log(t + 1) / math.log(num_steps)


def linear_decay(t: int, total: int, num_steps: int) -> float:
    """The share that is left after the warm-up of `num_steps`: from 1 down to 0 at step `total`,
    and 0 after it.
    """
    return max(0.0, (total - t) / max(1, total - num_steps))


def cosine_ratio(t: int, total: int, num_steps: int, final: float) -> float:
    """Half a cosine after the warm-up of `num_steps`: from 1 to `final` at step ``total - 1``,
    `final` after it.
    """
    # The step after the warm-up is the first of the cosine, so it is one step on already.
    progress = min(1.0, (t - num_steps + 1) / max(1, total - num_steps))
    return max(0.0, final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2.0)


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle up and down, then a decay."""

    first: int
    """Steps of the rising half."""
    second: int
    """Steps of the falling half."""
    first_stairs: int = 0
    """Stairs in the rising half; 0: a straight line."""
    second_stairs: int = 0
    """Stairs in the falling half."""
    decay_step_size: int = 0
    """Steps per unit of decay after the cycle; 0: none."""

    @property
    def total(self) -> int:
        """Steps in the cycle."""
        return self.first + self.second

    def height(self, t: int) -> float:
        """Position of step `t` of the cycle between the lower (0) and the upper (1) boundary."""
        step = t + 1
        if step <= 0 or step >= self.total:
            return 0.0
        # The falling half is the rising one mirrored: counted back from the end of the cycle.
        if step <= self.first:
            return _stair(step, self.first, self.first_stairs)
        return _stair(self.total - step, self.second, self.second_stairs)

    def decay(self, t: int) -> float | None:
        """How many decay intervals have passed after the cycle; None while step `t` is still in the
        cycle.
        """
        if t < self.total:
            return None
        return (t - self.total + 1) / self.decay_step_size if self.decay_step_size else 0.0


def _stair(step: int, length: int, stairs: int) -> float:
    """``step / length``, rounded down to a multiple of ``1 / stairs`` when there are stairs."""
    return step * stairs // length / stairs if stairs else step / length
