"""When columns are chosen again, and when an interval ends."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import log_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ds_core.context import Context
    from ds_zero.config import ZenFlowConfig
    from ds_zero.zenflow.weight import Weight

log = logging.getLogger("ds_zero")

CHOOSE_EVERY = 100
"""Steps between two choices of columns where the config leaves it open and the length of an epoch
is not known.
"""
LONGEST = 16
"""The most steps of an interval whose length the config leaves open."""


class Pace:
    """The intervals of one run."""

    def __init__(self, ctx: Context, keys: ZenFlowConfig) -> None:
        self._ctx = ctx
        self._keys = keys
        # Whether columns' norms are needed in every step.
        self.watches = keys.update_interval == "auto"

    @cached_property
    def choose_every(self) -> int:
        """Steps from one choice of columns to the next; first read in a step, when the engine
        has its loader.
        """
        keys = self._keys
        if keys.select_strategy == "step":
            return int(keys.select_interval)
        epoch = self._epoch()
        if keys.select_strategy == "epoch":
            if epoch is None:
                raise UsageError(
                    "zero_optimization.zenflow.select_strategy is 'epoch', and how many steps an "
                    "epoch has is not known: pass training_data, of known length, to initialize, "
                    "or use select_strategy 'step'"
                )
            epoch *= int(keys.select_interval)
        if epoch is None:
            log_once(
                log, logging.INFO, "zenflow: columns are chosen again every %d steps", CHOOSE_EVERY
            )
            return CHOOSE_EVERY
        if (
            keys.update_interval != "auto"
            and epoch < keys.update_interval
            and keys.select_strategy == "epoch"
        ):
            raise UsageError(
                f"zero_optimization.zenflow.select_interval: {keys.select_interval} epochs are "
                f"{epoch} steps, less than update_interval, {keys.update_interval}; columns are "
                "chosen at the beginning of an interval"
            )
        return epoch

    def _epoch(self) -> int | None:
        """The optimizer steps of an epoch."""
        try:
            batches = len(self._ctx.engine.training_dataloader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        return max(1, batches // self._ctx.batch.gas)

    def watch(self, norms: Mapping[Weight, Tensor], factor: float) -> None:
        """Note the mean norms of a step's columns, where they say when an interval ends."""
        # One synchronisation with the device for all weights.
        seen = [w for w in norms if self.watches and w.now and w.picked is not None]
        means = []
        for weight in seen:
            norm = norms[weight]
            picked = weight.picked
            total = norm.sum()
            most = norm[picked].sum()
            means += [
                (total - most) / (weight.columns - weight.wanted),
                most / max(weight.wanted, 1),
            ]
        values = (torch.stack(means).double() * factor).tolist() if means else []
        for weight, rest, chosen in zip(seen, values[::2], values[1::2], strict=True):
            weight.rest += rest
            weight.most += chosen

    def ends(self, weights: Sequence[Weight], steps: int) -> bool:
        """Whether the interval ends with this step, its `steps`th.

        The same on all ranks; collective.
        """
        if self._keys.update_interval != "auto":
            return steps >= self._keys.update_interval
        # Each weight counts once, on the rank that has its first element.
        mine = [w for w in weights if w.tallied and w.used]
        ready = sum(w.rest > w.most / steps for w in mine)
        count = torch.tensor([ready, len(mine)], device=self._ctx.accelerator.current_device())
        comm.label("weights that are due, for ZenFlow")
        comm.all_reduce(count)
        ready, everything = count.tolist()
        return steps >= LONGEST or ready >= self._keys.auto_ratio * everything
