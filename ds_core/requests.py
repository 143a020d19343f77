"""What plugins ask all ranks to do together after a step: stop training, or save a checkpoint now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ds_core import comm
from ds_core.entries import Request

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["Request", "agreed"]


def agreed(mine: Sequence[Request], ctx: Context) -> Request | None:
    """The union of what all ranks ask for, the same on each; None: nothing. Collective, with one byte per question.

    Of several folders to save into, the first rank's first one counts.
    """
    stop, save = any(r.stop for r in mine), next((r.save for r in mine if r.save), None)
    if ctx.world_size > 1:
        flags = torch.tensor([stop, save is not None], dtype=torch.uint8, device=ctx.accelerator.current_device())
        comm.label("what plugins ask for after this step")
        comm.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        stop, saves = map(bool, flags.tolist())
        if saves:
            save = next(folder for folder in comm.all_gather_json(save) if folder)
    return Request(stop, save) if stop or save else None
