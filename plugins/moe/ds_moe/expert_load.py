"""The load of each expert, for monitors: counted while layers run, summed over ranks once per step.

Where nobody reads metrics nothing is sent, and from the second step on nothing is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_core import comm
from ds_core.context import StashKey

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from ds_core.context import Context


class ExpertLoad:
    """What one layer has counted in training since the last step."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        # False once it is known that no monitor or observer reads metrics.
        self.watched = True
        # fp64 [num_experts + 3]: choices of each expert, dropped choices, the sum of auxiliary
        # losses, and how many those were. One tensor, so that a step makes one collective.
        self.totals: Float[Tensor, " totals"] | None = None

    @torch.no_grad()
    def add(
        self,
        counts: Int[Tensor, " experts"],
        dropped: Int[Tensor, "*one"],
        l_aux: Float[Tensor, ""] | None = None,
    ) -> None:
        """Count one forward: choices of each expert before dropping; how many were dropped; its
        auxiliary loss.
        """
        # A forward that activation checkpointing repeats inside backward was counted before.
        if torch._C._current_graph_task_id() != -1:
            return
        aux = counts.new_zeros(2, dtype=torch.float64)
        if l_aux is not None:
            aux = torch.stack([l_aux.double(), torch.ones_like(l_aux, dtype=torch.float64)])
        new = torch.cat([counts.double(), dropped.double().reshape(1), aux])
        self.totals = new if self.totals is None else self.totals + new


EXPERT_LOADS: StashKey[dict[str, ExpertLoad]] = StashKey("dscore-moe loads")
"""Per MoE layer of this rank, by its name; a transform that makes layers adds theirs."""

_LAYOUT: StashKey[dict[str, int]] = StashKey("dscore-moe layout")


def stop_counting(ctx: Context) -> None:
    """Nobody reads: forget what was counted, and count no more."""
    for load in (ctx.stash.get(EXPERT_LOADS) or {}).values():
        load.watched = False
        load.totals = None


def loads_of_step(ctx: Context) -> dict[str, float]:
    """The metrics of the step, the same on all ranks. Collective; called at the end of each step.

    ``Train/MoE/<layer>/``: ``expert_load_<expert>``, its share of all choices times the number of
    experts (1: even); ``load_max``; ``dropped``, the share of choices that were; ``aux_loss``, the
    mean.
    """
    loads = ctx.stash.get(EXPERT_LOADS) or {}
    layout = ctx.stash.get(_LAYOUT)
    if layout is None:
        # Ranks may have different layers (pipeline stages); asked once, as layers do not change.
        everyone = comm.all_gather_json({name: load.num_experts for name, load in loads.items()})
        layout = {name: size for layers in everyone for name, size in layers.items()}
        ctx.stash[_LAYOUT] = layout
    if not layout:
        return {}
    device = ctx.accelerator.current_device()
    # In the order of names, which is the same on every rank; a layer that this rank lacks counts as
    # zeros.
    parts = {
        n: torch.zeros(size + 3, dtype=torch.float64, device=device)
        for n, size in sorted(layout.items())
    }
    for name, load in loads.items():
        if load.totals is not None:
            parts[name] = load.totals.to(device)
            load.totals = None
    flat = torch.cat(list(parts.values()))
    comm.all_reduce(flat)
    totals = zip(parts, flat.cpu().split([len(p) for p in parts.values()]), strict=True)
    return {
        f"Train/MoE/{name or 'model'}/{key}": value
        for name, values in totals
        for key, value in _events(values)
    }


def _events(totals: Tensor) -> list[tuple[str, float]]:
    counts = totals[:-3]
    (dropped, aux, times) = totals[-3:].tolist()
    choices = float(counts.sum())
    if choices == 0:  # no micro-batch came through, or no token
        return []
    # Relative to an even load, so that 1 is even for any number of experts.
    shares = (counts * (len(counts) / choices)).tolist()
    events = [(f"expert_load_{i}", share) for i, share in enumerate(shares)]
    events += [("load_max", max(shares)), ("dropped", dropped / choices)]
    return [*events, ("aux_loss", aux / times)] if times else events
