"""AutoEP changes a model: each rank keeps its share of a block's experts, and the block uses it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from ds_run_state.changes import gather_slices, reshape
from ds_run_state.slices import SLICES, Slice
from torch import Tensor, nn

from ds_core import comm
from ds_moe.autoep.block import AutoEPMoELayer
from ds_moe.expert_load import EXPERT_LOADS, ExpertLoad
from ds_moe.layer import mark_expert
from ds_moe.place_layers import EXPERT_PARALLEL

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.undo import Undo
    from ds_moe.autoep.plan import BlockPlan


def install(plan: BlockPlan, model: nn.Module, undo: Undo) -> None:
    """Cut the block's experts to this rank's, and replace the module that runs them. Collective.

    undo: is given the functions that make the experts' weights full again on every rank; they are
        collectives.
    """
    ctx = plan.ctx
    share = plan.share
    # 1. Weights: each rank keeps its share, and declares which slice (or which names) it has.
    if plan.listed:
        _assign_listed(plan, undo)
    else:
        before = ctx.stash.get(SLICES)
        slices = dict(before) if before is not None else {}
        done: dict[nn.Parameter, Slice] = {}
        # Registered before the first cut, so that a failure half way gives back what was cut.
        undo(functools.partial(_join, done, plan))
        for name, param in plan.params.items():
            piece = Slice.of(param.shape).cut("ep", 0, share.first, share.rows)
            slices[f"{plan.prefix}.{name}"] = piece
            _cut(param, plan)
            done[param] = piece
        ctx.stash[SLICES] = slices
    # 2. The module that runs them, in the mode of the one it replaces.
    experts = plan.make_experts(share)
    experts.train(plan.experts.training)
    for param in experts.parameters():
        mark_expert(param, share.size)
    # 3. Its load is counted with that of `MoE` layers.
    others = ctx.stash.get(EXPERT_LOADS)
    experts.load = ExpertLoad(plan.count)
    ctx.stash[EXPERT_LOADS] = {**(others if others is not None else {}), plan.name: experts.load}
    # 4. The child alone where the model's block calls it as such, else the whole block.
    if plan.how is None:
        setattr(plan.block, plan.preset.experts, experts)
        return
    parent, _, last = plan.name.rpartition(".")
    setattr(model.get_submodule(parent), last, AutoEPMoELayer(plan, experts))


def _assign_listed(plan: BlockPlan, undo: Undo) -> None:
    """Give each expert of a list to one rank along ep, under a name that the others do not have."""
    before = plan.ctx.stash.get(EXPERT_PARALLEL)
    names = set(before) if before is not None else set()
    share = plan.share
    elsewhere: dict[int, dict[str, torch.Size]] = {}
    undo(functools.partial(_fetch, elsewhere, plan))
    for number, expert in enumerate(plan.listed):
        for param in expert.parameters():
            _send(param, plan.ctx)
        if share.first <= number < share.first + share.rows:
            named = (*expert.named_parameters(), *expert.named_buffers())
            names |= {f"{plan.prefix}.{number}.{name}" for name, _ in named}
        else:
            # The model's own list keeps these modules for `_fetch`, without their memory.
            elsewhere[number] = {name: param.shape for name, param in expert.named_parameters()}
            for param in expert.parameters():
                reshape(param, param.data.new_empty(0))
    plan.ctx.stash[EXPERT_PARALLEL] = names


@torch.no_grad()
def _cut(param: nn.Parameter, plan: BlockPlan) -> None:
    """Leave this rank's rows of `param`, which stays the object it is."""
    full = _send(param, plan.ctx)
    share = plan.share
    param.grad = None
    param.data = full[share.first : share.first + share.rows].clone()


@torch.no_grad()
def _send(param: nn.Parameter, ctx: Context) -> Tensor:
    """The first rank's values, which `param` has from then on too; see [Note: whose weights]."""
    if ctx.mesh.size("dp") == 1 or param.is_meta:
        return param.data
    full = param.data.to(ctx.accelerator.current_device()).contiguous()
    comm.broadcast(full, src=ctx.mesh.ranks("dp")[0], group=ctx.mesh.group("dp"))
    param.data = full
    return full


# -- giving back -----------------------------------------------------------------------------------


def _join(done: dict[nn.Parameter, Slice], plan: BlockPlan) -> None:
    """Gather stacked weights, so that every rank has all experts again. Collective."""
    if plan.share.size > 1 and not _on_meta(done):
        gather_slices(done, plan.ctx.mesh, "ep")


@torch.no_grad()
def _fetch(elsewhere: dict[int, dict[str, torch.Size]], plan: BlockPlan) -> None:
    """Fetch the experts of a list that other ranks trained. Collective.

    elsewhere: of each such expert, the shapes of its parameters.
    """
    share = plan.share
    mesh = plan.ctx.mesh
    if share.size == 1 or _on_meta(p for expert in plan.listed for p in expert.parameters()):
        return
    ranks = mesh.ranks("ep")
    group = mesh.group("ep")
    # The engine may have changed dtypes, for all experts in the same way.
    dtypes = {name: param.dtype for name, param in plan.listed[share.first].named_parameters()}
    for number, expert in enumerate(plan.listed):
        # In the order of the full list, which is the same on every rank: broadcasts are collectives.
        owner = ranks[number // share.rows]
        for name, param in expert.named_parameters():
            if number in elsewhere:
                reshape(
                    param,
                    torch.empty(elsewhere[number][name], dtype=dtypes[name], device=param.device),
                )
            comm.broadcast(param.data, src=owner, group=group)
        for buffer in expert.buffers():
            comm.broadcast(buffer, src=owner, group=group)


def _on_meta(params: Iterable[nn.Parameter]) -> bool:
    return any(param.is_meta for param in params)
