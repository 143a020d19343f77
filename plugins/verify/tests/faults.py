"""Planted faults, as a plugin that a config loads: ``"plugins": {"load": ["fault=faults"]}``.

Each acts where there are several ranks alone, as real ones do, so the reference is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.config import Section, option
from ds_core.context import StashKey
from ds_core.entries import Phase, Transform

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients, GradientShard

LOCAL: StashKey[dict[str, list[Tensor]]] = StashKey("each micro-batch's gradients")


class Fault(Section):
    """Which fault is planted, and where."""

    kind: str = option(..., "A function of this module.")
    name: str = option("blocks.1.up.weight", "The parameter.")


def ds_config() -> type[Fault]:
    """The section ``fault``."""
    return Fault


def _fault(ctx: Context) -> Fault | None:
    return ctx.config.section(Fault) if ctx.world_size > 1 else None


# -- in the model ----------------------------------------------------------------------------------


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Faults that are built into the model."""
    fault = _fault(ctx)
    change = {"untied": _untie, "lost_use": _lose_use, "other_eps": _other_eps}
    if fault is not None and fault.kind in change:
        return [Transform(Phase.SUBSTITUTE, change[fault.kind])]
    return ()


def _untie(model: nn.Module) -> nn.Module:
    """The tied output layer gets weights of its own."""
    head: Any = model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def _lose_use(model: nn.Module) -> nn.Module:
    """A module that is used twice passes its second use no gradient."""
    shared: Any = model.get_submodule("shared")
    plain = shared.forward
    uses = [0]

    def forward(x: Tensor) -> Tensor:
        uses[0] += 1
        if uses[0] % 2:
            return plain(x)  # type: ignore[no-any-return]
        return nn.functional.linear(x, shared.weight.detach(), shared.bias)

    shared.forward = forward
    return model


def _other_eps(model: nn.Module) -> nn.Module:
    """A norm computes with another epsilon."""
    norm: Any = model.get_submodule("blocks.1.norm")
    norm.eps = 1e-2
    return model


# -- around the step -------------------------------------------------------------------------------


def ds_open(ctx: Context) -> None:
    """Faults in what the engine calls."""
    fault = _fault(ctx)
    if fault is None:
        return
    local: dict[str, list[Tensor]] = {}
    ctx.stash[LOCAL] = local
    for param, info in ctx.params.items():
        local[info.name] = []
        param.register_hook(lambda g, rows=local[info.name]: rows.append(g.detach().clone()))
    at = {info.name: param for param, info in ctx.params.items()}
    partitioner = ctx.engine.partitioner
    if fault.kind == "half_updated":
        _after(partitioner, "publish", _keep_half(at[fault.name]))
    if fault.kind == "not_published":
        _after(partitioner, "publish", _restore(at[fault.name], ctx.rank == 1))
    if fault.kind == "stale":
        _use_stale(ctx, fault.name, at[fault.name])
    if fault.kind == "swapped":
        _swap(ctx, at[fault.name], at["blocks.2.up.weight"])
    if fault.kind == "norm":
        _local_norm(ctx)


def _after(target: Any, method: str, act: Callable[[bool], None]) -> None:
    """Call `act` before (with True) and after (with False) what `partitioner.step` and `publish`
    do together.
    """
    step, publish = target.step, target.publish

    def stepping(*args: Any) -> None:
        act(True)
        step(*args)

    def publishing() -> None:
        publish()
        act(False)

    target.step, target.publish = stepping, publishing


def _keep_half(param: Tensor) -> Callable[[bool], None]:
    """The optimizer updates the first half of a parameter alone."""
    kept: list[Tensor] = []

    def act(before: bool) -> None:
        if before:
            kept[:] = [param.detach().clone()]
        else:
            half = param.numel() // 2
            param.data.view(-1)[half:] = kept[0].view(-1)[half:]

    return act


def _restore(param: Tensor, here: bool) -> Callable[[bool], None]:
    """One rank does not get the new value."""
    kept: list[Tensor] = []

    def act(before: bool) -> None:
        if before:
            kept[:] = [param.detach().clone()]
        elif here:
            param.data.copy_(kept[0])

    return act


def _use_stale(ctx: Context, name: str, param: Tensor) -> None:
    """A module computes with the weight of the step before."""
    assert ctx.module is not None
    module = ctx.module.get_submodule(name.rpartition(".")[0])
    old = [param.detach().clone()]
    _after(ctx.engine.partitioner, "publish", lambda before: _note(old, param, before))

    def forward(x: Tensor) -> Tensor:
        # The right gradient arrives at the parameter, at another value.
        return nn.functional.linear(x, param + (old[-2] - param).detach(), module.bias)  # type: ignore[arg-type]

    plain = module.forward
    module.forward = lambda x: forward(x) if len(old) > 1 else plain(x)


def _note(old: list[Tensor], param: Tensor, before: bool) -> None:
    if not before:
        old.append(param.detach().clone())


def _swap(ctx: Context, first: Tensor, second: Tensor) -> None:
    """On one rank two weights stand in each other's place."""
    if ctx.rank == 1:
        kept = first.detach().clone()
        first.data.copy_(second.detach())
        second.data.copy_(kept)


def _local_norm(ctx: Context) -> None:
    """The norm counts the elements of this rank alone."""
    engine: Any = ctx.engine
    engine._weight_update.norm = lambda groups, device: (
        sum(float(t.square().sum()) for group in groups for t in group.tensors) ** 0.5
    )


# -- on reduced gradients --------------------------------------------------------------------------


def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """Faults of the reduction."""
    fault = _fault(ctx)
    if fault is None:
        return
    local = ctx.stash[LOCAL]
    parts = ctx.mesh.size("dp")
    for shard in gradients.shards:
        if fault.kind == "wrong_divisor":
            shard.tensor.mul_(parts)
        if fault.kind == "last_micro":
            _drop_last(shard, local[shard.name], parts)
        if shard.name != fault.name:
            continue
        if fault.kind == "not_reduced":
            shard.tensor.copy_(shard.take(sum(local[shard.name], torch.zeros(()))))
        if fault.kind == "zero" or (fault.kind == "once" and gradients.step == 0):
            shard.tensor.zero_()
        if fault.kind == "bfloat16":
            shard.tensor.copy_(shard.tensor.bfloat16())
        if fault.kind == "half_reduced":
            shard.tensor.view(-1)[: shard.tensor.numel() // 2].mul_(0.5)
    for rows in local.values():
        rows.clear()


def _drop_last(shard: GradientShard, rows: list[Tensor], parts: int) -> None:
    """The gradient lacks the last micro-batch."""
    last = rows[-1].clone()
    comm.all_reduce(last)
    shard.tensor.sub_(shard.take(last / parts))
