"""AutoEP changes a model: each rank keeps its share of a block's experts, and the block is made to use it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from ds_run_state.slices import SLICES, Slice
from torch import Tensor, nn

from ds_core import comm
from ds_moe.autoep_block import AutoEPMoELayer
from ds_moe.expert_load import EXPERT_LOADS, ExpertLoad
from ds_moe.layer import mark_expert
from ds_moe.place_layers import EXPERT_PARALLEL

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_moe.autoep_plan import BlockPlan

__all__ = ["install"]

log = logging.getLogger("ds_moe")


def install(plan: BlockPlan, model: nn.Module) -> None:
    """Cut the experts of the block to this rank's, and put what runs them in the place of what did. Collective."""
    ctx, share = plan.ctx, plan.share
    if plan.listed:
        _give_out(plan)
    else:
        before = ctx.stash.get(SLICES)
        slices = dict(before) if before is not None else {}
        for name, param in plan.params.items():
            slices[f"{plan.prefix}.{name}"] = Slice.of(param.shape).cut("ep", 0, share.first, share.rows)
            _cut(param, plan)
        ctx.stash[SLICES] = slices
    experts = plan.make_experts(share)
    experts.train(plan.experts.training)
    for param in experts.parameters():
        mark_expert(param, share.size)
    others = ctx.stash.get(EXPERT_LOADS)
    experts.load = ExpertLoad(plan.count)
    ctx.stash[EXPERT_LOADS] = {**(others if others is not None else {}), plan.name: experts.load}
    if plan.how is None:
        setattr(plan.block, plan.preset.experts, experts)
        return
    parent, _, last = plan.name.rpartition(".")
    setattr(model.get_submodule(parent), last, AutoEPMoELayer(plan, experts))


def _give_out(plan: BlockPlan) -> None:
    """Experts of a list belong to one rank along ep each, under names that the others do not have."""
    before = plan.ctx.stash.get(EXPERT_PARALLEL)
    names = set(before) if before is not None else set()
    for number, expert in enumerate(plan.listed):
        for param in expert.parameters():
            _send(param, plan.ctx)
        if plan.share.first <= number < plan.share.first + plan.share.rows:
            named = (*expert.named_parameters(), *expert.named_buffers())
            names |= {f"{plan.prefix}.{number}.{name}" for name, _ in named}
    plan.ctx.stash[EXPERT_PARALLEL] = names


@torch.no_grad()
def _cut(param: nn.Parameter, plan: BlockPlan) -> None:
    """Leave this rank's rows of `param`, which stays the object it is."""
    full, share = _send(param, plan.ctx), plan.share
    param.grad = None
    param.data = full[share.first : share.first + share.rows].clone()


@torch.no_grad()
def _send(param: nn.Parameter, ctx: Context) -> Tensor:
    """The first rank's values of `param`, which it takes over too."""
    if ctx.mesh.size("dp") == 1 or param.is_meta:
        return param.data
    full = param.data.to(ctx.accelerator.current_device()).contiguous()
    comm.broadcast(full, src=ctx.mesh.ranks("dp")[0], group=ctx.mesh.group("dp"))
    param.data = full
    return full
