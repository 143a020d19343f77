"""One evaluation batch: forward of micro-batches in eval mode, and the mean loss over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.mesh import Mesh
    from ds_core.running import RunningEngine

__all__ = ["evaluate", "mean_over_dp"]


@torch.no_grad()
def evaluate(
    engine: RunningEngine,
    batches: Iterator[Any],
    count: int,
    *,
    return_logits: bool,
    compute_loss: bool,
    reduce_output: str | None,
    bcast_loss: bool,
) -> Any:
    """See `Engine.eval_batch`; count: the number of micro-batches."""
    if reduce_output not in ("avg", None):
        raise UsageError(f"reduce_output={reduce_output!r}; it is 'avg' or None")
    engine.telemetry.notify("ds_eval_begin")
    with _eval_mode(engine.module):
        loss, outputs = engine.runner.evaluate(
            engine, batches, count, return_logits=return_logits or not compute_loss, compute_loss=compute_loss
        )
    if not compute_loss or (not bcast_loss and not engine.runner.makes_loss):
        loss = None
    if loss is not None and reduce_output == "avg":
        loss = mean_over_dp(loss, engine.ctx.mesh)
    if engine.telemetry.observes("ds_eval_end"):
        engine.telemetry.notify("ds_eval_end", metrics={} if loss is None else {"loss": loss.item()})
    if not compute_loss:
        return outputs
    return (loss, outputs) if return_logits else loss


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode inside; afterwards each in the mode that it was in."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def mean_over_dp(loss: Tensor, mesh: Mesh) -> Tensor:
    """The mean of a loss over the dp ranks; in fp32 where the loss has 16 bits. Collective along dp."""
    if mesh.size("dp") == 1:
        return loss
    total = loss.detach().float() if loss.dtype in (torch.float16, torch.bfloat16) else loss.detach().clone()
    comm.all_reduce(total, group=mesh.group("dp"))
    return total / mesh.size("dp")
