"""What a technique does at a step, from the optimizer steps that are done (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass


def bits_at(age: int, start: int, target: int, period: int) -> int:
    """Bits after `age` steps of quantisation: one less after every `period` steps, from `start`
    down to `target`.
    """
    return max(target, start - age // period)


@dataclass(slots=True)
class Pace:
    """How a layer loses bits whose eigenvalue is looked at whenever it loses one.

    due: the age at which the next bit goes.
    last: that of the last one.
    lost: bits so far.
    """

    due: int
    last: int = 0
    lost: int = 0

    def advance(self, age: int, most: int, period: int, factor: int) -> None:
        """Go on to `age`, losing `most` bits in all; the period after a bit is lost is `factor`
        times `period`.
        """
        while self.lost < most and age >= self.due:
            self.last = self.due
            self.due += period * factor
            self.lost += 1

    def as_list(self) -> list[int]:
        """For checkpoints."""
        return [self.due, self.last, self.lost]


def share_at(age: int, start: int, target: int, period: int, ratio: float) -> float:
    """The part of the quantised value in a mixed weight after `age` steps.

    It grows by `ratio` with each step, up to 1, and begins anew whenever there is one bit less.
    """
    # Steps since the last bit was removed; it keeps growing after the target is reached.
    since = age - min(age // period, start - target) * period
    return min(1.0, ratio * (since + 1))


def changes(step: int, offset: int, end: int, stride: int) -> bool:
    """Whether pruning by steps makes new masks for `step`: at `offset`, every `stride` steps after
    it, and at `end`.
    """
    return offset <= step <= end and ((step - offset) % stride == 0 or step == end)


def kept_at(step: int, offset: int, end: int, ratio: float) -> float:
    """The part that is kept at `step`: it falls from 1 before `offset` to `ratio` at `end`, fast at
    first.

    The cubic schedule of Zhu and Gupta, To prune, or not to prune (2017), equation 1.
    """
    if step >= end:
        return ratio
    left = 1 - (step + 1 - offset) / (end + 1 - offset)  # the first pruning prunes something
    return 1 - (1 - ratio) * (1 - left**3)
