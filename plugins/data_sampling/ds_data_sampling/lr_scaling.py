"""The learning rate of a step by its number of samples, whatever the schedule: scaled for the
update, then restored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ds_core import comm
from ds_core.context import StashKey
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context

STEP_FACTOR: StashKey[float] = StashKey(
    "learning rate factor of the step whose batches are being read"
)
_SCALER: StashKey[_Scaler] = StashKey("what scales the learning rate")


def scale(method: str, samples: int, usual: int) -> float:
    """What the learning rate is multiplied by in a step of `samples` samples where the config says
    `usual`.

    method: "linear", "sqrt" or "none".
    """
    if method == "none":
        return 1.0
    return math.sqrt(samples / usual) if method == "sqrt" else samples / usual


def check_optimizer(optimizer: Any) -> None:
    """Raise UsageError for an optimizer whose updates are not known."""
    if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(
            "dynamic_batching.lr_scaling_method needs an optimizer that is a "
            "torch.optim.Optimizer, not a "
            f"{type(optimizer).__name__}; set it to none"
        )


def begin_step(ctx: Context) -> None:
    """An optimizer step is about to happen.

    Every rank; collective in a pipeline, whose inner stages read no data.
    """
    factor = ctx.stash.get(STEP_FACTOR) or 0.0
    if not ctx.engine.runner.manual and ctx.world_size > 1:
        largest = torch.tensor(
            [factor], dtype=torch.float64, device=ctx.accelerator.current_device()
        )
        comm.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        factor = float(largest.item())
    if (optimizer := ctx.engine.optimizer) is None:
        return
    if _SCALER not in ctx.stash:
        ctx.stash[_SCALER] = _Scaler(optimizer)
    ctx.stash[_SCALER].factor = factor or 1.0  # 0: the batches of this step are not the loader's
    ctx.stash[STEP_FACTOR] = 0.0


class _Scaler:
    """Multiplies the learning rates of an optimizer's groups by `factor` while it updates."""

    factor = 1.0

    def __init__(self, optimizer: Optimizer) -> None:
        self._kept: list[tuple[dict[str, Any], Any]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # of an update that failed
        if self.factor == 1.0:
            return
        self._kept = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
        for group, lr in self._kept:
            group["lr"] = lr * self.factor

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for group, lr in self._kept:
            group["lr"] = lr
        self._kept = []
