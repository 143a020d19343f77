"""The schedules of the documents, each writing a curve of `curves` into the groups of an optimizer.

A schedule's state is one number, the index of the last step taken; learning rates and momenta
follow from it, the arguments and the groups' learning rates at the start. They are written when the
schedule is made, at every `step` and when a state is loaded, so that a resumed run continues
exactly like one that was not interrupted.
"""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_lr_schedules import curves

log = logging.getLogger("ds_lr_schedules")

PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one for each of them in order."""

CYCLE_BETA2 = 0.99
WARMUP_TYPES = ("log", "linear")


class Schedule(ABC):
    """What the schedules share: the step counter, and writing learning rates into
    ``optimizer.param_groups``.

    A subclass sets its arguments and then calls `_write`. Raises TypeError for an optimizer without
    groups and ValueError for a counter below -1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{type(self).__name__} needs a torch.optim.Optimizer, not "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.last_batch_iteration = _whole(
            "last_batch_iteration", last_batch_iteration, at_least=-1
        )
        # Lists of the arguments are for these groups.
        self._num_groups = len(optimizer.param_groups)

    @abstractmethod
    def _lrs(self, t: int) -> list[float]:
        """The learning rate of each group after step `t` (-1: before the first)."""

    def get_lr(self) -> list[float]:
        """The learning rate of each group that the schedule gives for the steps taken so far."""
        return self._lrs(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group that the schedule wrote last."""
        return list(self._last_lrs)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go one step on, or to step `last_batch_iteration`, and write the learning rates.

        Raises RuntimeError when groups were added to the optimizer since the schedule was made.
        """
        go_to = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self.last_batch_iteration = _whole("last_batch_iteration", go_to, at_least=-1)
        self._write()

    def state_dict(self) -> dict[str, int]:
        """``{"last_batch_iteration": t}``; the arguments are the config's and are not kept."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the step that `state_dict` names and write its learning rates.

        Raises ValueError when the state is not one of ours.
        """
        if "last_batch_iteration" not in state_dict:
            keys = ", ".join(map(str, state_dict)) or "nothing"
            raise ValueError(
                f"{type(self).__name__}: a state has 'last_batch_iteration', this one has {keys}"
            )
        self.step(state_dict["last_batch_iteration"])

    def _write(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != self._num_groups:
            raise RuntimeError(
                f"{type(self).__name__} was made for {self._num_groups} parameter groups and the "
                f"optimizer now has {len(groups)}; add every group before making the schedule"
            )
        self._last_lrs = self.get_lr()
        for group, lr in zip(groups, self._last_lrs, strict=True):
            group["lr"] = _put(group["lr"], lr)

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        """`value` for each group; a list must have one entry per group (ValueError)."""
        if not isinstance(value, Sequence):
            return [float(value)] * self._num_groups
        if len(value) != self._num_groups:
            raise ValueError(
                f"{name} has {len(value)} entries and the optimizer has {self._num_groups} "
                "parameter groups; give one number, or one per group"
            )
        return [float(v) for v in value]

    def _base_lrs(self) -> list[float]:
        """The groups' learning rates from before any schedule touched them.

        They stay in the group as ``initial_lr`` (torch's name), so that a schedule made for an
        optimizer whose state was loaded finds them again.
        """
        for group in self.optimizer.param_groups:
            # A new run starts from the rate that the group has; a resumed one must not take a
            # scheduled rate for it.
            if self.last_batch_iteration < 0 or "initial_lr" not in group:
                group["initial_lr"] = float(group["lr"])
        return [float(group["initial_lr"]) for group in self.optimizer.param_groups]


class LRRangeTest(Schedule):
    """Raises the learning rate at a constant rate, to find the largest that does not diverge.

    lr_range_test_min_lr: where it starts, one number or one per group.
    lr_range_test_step_size: steps in which it grows by `lr_range_test_step_rate` times the start.
    lr_range_test_staircase: only at the end of each interval.

    Raises ValueError for a list of another length than the groups, and a step size that is no
    positive integer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size, at_least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._write()

    def _lrs(self, t: int) -> list[float]:
        factor = curves.range_test(t, self.step_size, self.step_rate, self.staircase)
        return [low * factor for low in self.min_lrs]


class OneCycle(Schedule):
    """One cycle of the learning rate from low to high and back, the momentum mirrored, and then a
    decay.

    (Smith 2018, "Super-convergence".) The arguments:

    - ``cycle_min_lr``, ``cycle_max_lr``, ``cycle_min_mom``, ``cycle_max_mom``: boundaries, one
      number or one per group;
    - ``cycle_first_step_size``, ``cycle_second_step_size``: steps up and down (the second defaults
      to the first);
    - ``cycle_first_stair_count``, ``cycle_second_stair_count``: stairs in each half, 0 for none (the
      second defaults to the first);
    - ``decay_step_size``: steps per unit of decay after the cycle, 0 for none;
    - ``decay_lr_rate``, ``decay_mom_rate``: the decay per unit;
    - ``cycle_momentum``: write ``betas = (momentum, 0.99)`` too; off, with a warning, for an
      optimizer without betas.

    Raises ValueError for wrong lengths, sizes and counts.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = _whole("cycle_first_step_size", cycle_first_step_size, at_least=1)
        stairs = _whole("cycle_first_stair_count", cycle_first_stair_count, at_least=0)
        self.cycle = curves.Cycle(
            first=first,
            second=_whole("cycle_second_step_size", _or(cycle_second_step_size, first), at_least=0),
            first_stairs=stairs,
            second_stairs=_whole(
                "cycle_second_stair_count", _or(cycle_second_stair_count, stairs), at_least=0
            ),
            decay_step_size=_whole("decay_step_size", decay_step_size, at_least=0),
        )
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.cycle_momentum = cycle_momentum and self._has_betas()
        self._write()

    def get_mom(self) -> list[float]:
        """The momentum (first beta) of each group for the steps taken so far; empty when it is not
        cycled.
        """
        return self._moms(self.last_batch_iteration) if self.cycle_momentum else []

    def _lrs(self, t: int) -> list[float]:
        # Behind the cycle: from the lower boundary on, divided by 1 + rate x intervals.
        decay = self.cycle.decay(t)
        if decay is not None:
            return [low / (1.0 + self.decay_lr_rate * decay) for low in self.min_lrs]
        return _between(self.min_lrs, self.max_lrs, self.cycle.height(t))

    def _moms(self, t: int) -> list[float]:
        # DeepSpeed starts at the lower boundary, although the mirrored curve starts at the upper.
        if t < 0:
            return list(self.min_moms)
        decay = self.cycle.decay(t)
        if decay is not None:
            return [high * (1.0 + self.decay_mom_rate * decay) for high in self.max_moms]
        return _between(self.max_moms, self.min_moms, self.cycle.height(t))

    def _write(self) -> None:
        super()._write()
        if self.cycle_momentum:
            for group, mom in zip(self.optimizer.param_groups, self.get_mom(), strict=True):
                beta1, beta2, *others = group["betas"]
                group["betas"] = (_put(beta1, mom), _put(beta2, CYCLE_BETA2), *others)

    def _has_betas(self) -> bool:
        if all("betas" in group for group in self.optimizer.param_groups):
            return True
        log.warning(
            "OneCycle: cycle_momentum is off, since %s has no betas; set cycle_momentum to false",
            type(self.optimizer).__name__,
        )
        return False


class _Warmup(Schedule):
    """What the three warm-up schedules share: the length and the shape of the warm-up."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = curves.warmup_steps(
            _whole("warmup_num_steps", num_steps, at_least=0)
        )
        self.warmup_type = warmup_type
        if warmup_type not in WARMUP_TYPES:
            self.warmup_type = "log"
            log.warning(
                "%s: warmup_type %r is not known and 'log' is used; choose 'log' or 'linear'",
                type(self).__name__,
                warmup_type,
            )

    def _warmup(self, t: int) -> float:
        return curves.warmup(t, self.warmup_num_steps, self.warmup_type)

    def _bounds(self, min_lr: PerGroup, max_lr: PerGroup | None) -> tuple[list[float], list[float]]:
        base = self._base_lrs()
        highs = base if max_lr is None else self._per_group("warmup_max_lr", max_lr)
        return self._per_group("warmup_min_lr", min_lr), highs

    def _total(self, total_num_steps: int) -> int:
        total = _whole("total_num_steps", total_num_steps, at_least=1)
        if total < self.warmup_num_steps:
            log.warning(
                "%s: total_num_steps %d is less than the %d steps of the warm-up, so nothing is "
                "left to decay over",
                type(self).__name__,
                total,
                self.warmup_num_steps,
            )
        return total


class WarmupLR(_Warmup):
    """Raises the learning rate from a minimum to a maximum and keeps it there.

    warmup_min_lr, warmup_max_lr: one number or one per group; a maximum of None is each group's own
        learning rate.
    warmup_num_steps: length of the warm-up, at least 2; 0: none.
    warmup_type: ``"log"`` or ``"linear"``.

    Raises ValueError for wrong lengths and a length of warm-up that is no positive integer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.min_lrs, self.max_lrs = self._bounds(warmup_min_lr, warmup_max_lr)
        self._write()

    def _lrs(self, t: int) -> list[float]:
        return _between(self.min_lrs, self.max_lrs, self._warmup(t))


class WarmupDecayLR(_Warmup):
    """Raises the learning rate as `WarmupLR` does, then lowers it linearly to the minimum at
    `total_num_steps`.

    total_num_steps: steps of the schedule, warm-up included. The other arguments are those of
    `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = self._total(total_num_steps)
        self.min_lrs, self.max_lrs = self._bounds(warmup_min_lr, warmup_max_lr)
        self._write()

    def _lrs(self, t: int) -> list[float]:
        # Up by the warm-up, then down by the linear decay to the same minimum.
        rising = t < self.warmup_num_steps
        share = (
            self._warmup(t)
            if rising
            else curves.linear_decay(t, self.total_num_steps, self.warmup_num_steps)
        )
        return _between(self.min_lrs, self.max_lrs, share)


class WarmupCosineLR(_Warmup):
    """Scales each group's own learning rate: up from a ratio to 1, then down half a cosine to
    another ratio.

    Before the first step the learning rate is 0.

    total_num_steps: steps of the schedule, warm-up included.
    warmup_min_ratio: where the warm-up starts, one number or one per group.
    warmup_num_steps, warmup_type: as for `WarmupLR`.
    cos_min_ratio: where the cosine ends.

    Raises ValueError for wrong lengths and step counts.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: PerGroup = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = self._total(total_num_steps)
        self.min_ratios = self._per_group("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = cos_min_ratio
        self.base_lrs = self._base_lrs()
        self._write()

    def _lrs(self, t: int) -> list[float]:
        return [
            base * self._ratio(t, low)
            for base, low in zip(self.base_lrs, self.min_ratios, strict=True)
        ]

    def _ratio(self, t: int, low: float) -> float:
        # Before the first step there is no ratio of the warm-up yet.
        if t < 0 and self.warmup_num_steps:
            return 0.0
        if t < self.warmup_num_steps:
            return low + (1.0 - low) * self._warmup(t)
        return curves.cosine_ratio(
            t, self.total_num_steps, self.warmup_num_steps, self.cos_min_ratio
        )


def _between(starts: list[float], ends: list[float], share: float) -> list[float]:
    """For each group, start + share * (end - start)."""
    return [start + (end - start) * share for start, end in zip(starts, ends, strict=True)]


def _put(old: Any, value: float) -> Any:
    """`value` in place of `old`: a tensor stays the same tensor, since a captured graph or a
    compiled step reads it.
    """
    if not isinstance(old, torch.Tensor):
        return value
    with torch.no_grad():
        return old.fill_(value)


def _whole(name: str, value: Any, at_least: int) -> int:
    """`value` as an integer of at least `at_least`, or a ValueError that names it."""
    kind = {1: "a positive integer", 0: "an integer of at least 0"}.get(
        at_least, f"an integer of at least {at_least}"
    )
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be {kind}, not {value!r}") from None
    if isinstance(value, bool) or number < at_least:
        raise ValueError(f"{name} must be {kind}, not {value!r}")
    return number


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
