"""A runner that takes all micro-batches of a step before it runs the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.runner import Runner, Sequential, call_with_batch, loss_of

if TYPE_CHECKING:
    from ds_core.running import RunningEngine


class OldRunner(Runner):
    """Pulls first; evaluation is that of the core's runner."""

    def train(self, engine: RunningEngine, batches: Iterator[Any], count: int) -> Tensor:
        """``engine.backward_micro(loss, last=...)`` once per micro-batch; returns their mean loss."""
        losses = []
        for index, batch in enumerate([next(batches) for _ in range(count)]):
            loss = loss_of(call_with_batch(engine, batch))
            engine.backward_micro(loss, last=index == count - 1)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def evaluate(
        self,
        engine: RunningEngine,
        batches: Iterator[Any],
        count: int,
        *,
        return_logits: bool,
        compute_loss: bool = True,
    ) -> tuple[Tensor | None, Any]:
        """Forward only."""
        core = Sequential()
        return core.evaluate(engine, batches, count, return_logits=return_logits, compute_loss=compute_loss)
