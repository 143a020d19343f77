"""Planted faults, as a plugin that a config loads: ``"plugins": {"load": ["fault=faults"]}``.

Each acts where there are several ranks alone, as real ones do, so the reference is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from more_faults import GRADIENT, MODEL, OPENED
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
    change = {
        **MODEL,
        "untied": _untie,
        "lost_use": _lose_use,
        "other_eps": _other_eps,
        "no_dropout": _no_dropout,
        "own_dropout": _own_dropout,
        "cast": _cast,
        "detached": _detached,
        "no_residual": _no_residual,
        "no_bias": _no_bias,
    }
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


def _no_dropout(model: nn.Module) -> nn.Module:
    """A block forgets to drop."""
    model.get_submodule("blocks.1.drop").p = 0.0  # type: ignore[assignment]
    return model


def _own_dropout(model: nn.Module) -> nn.Module:
    """A block draws by numbers of its own."""
    drop: Any = model.get_submodule("blocks.1.drop")
    own = torch.Generator().manual_seed(99)
    drop.forward = lambda x: x * (torch.rand(x.shape, generator=own) > drop.p) / (1 - drop.p)
    return model


def _cast(model: nn.Module) -> nn.Module:
    """A layer computes in bf16."""
    up: Any = model.get_submodule("blocks.1.up")
    plain = up.forward
    up.forward = lambda x: plain(x.bfloat16().to(x.dtype))
    return model


def _detached(model: nn.Module) -> nn.Module:
    """A block passes no gradient through its branch to what is before it."""
    norm: Any = model.get_submodule("blocks.1.norm")
    plain = norm.forward
    norm.forward = lambda x: plain(x.detach())
    return model


def _no_residual(model: nn.Module) -> nn.Module:
    """A block gives its branch alone."""
    block: Any = model.get_submodule("blocks.1")
    plain = block.forward
    block.forward = lambda x: plain(x) - x
    return model


def _no_bias(model: nn.Module) -> nn.Module:
    """A sum over ranks leaves the bias out, as a wrong row-parallel layer does."""
    down: Any = model.get_submodule("blocks.1.down")
    down.forward = lambda x: nn.functional.linear(x, down.weight) + 0 * down.bias
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
    if fault.kind == "large_norm":
        _large_norm(ctx)
    if fault.kind == "rank_lr" and ctx.rank == 1:
        for group in ctx.engine.optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] *= 2
    if fault.kind == "not_updated":
        _after(partitioner, "publish", _restore(at[fault.name], True))
    if fault.kind == "drift" and ctx.rank == 1:
        at[fault.name].data.mul_(1.001)
    if fault.kind in OPENED:
        OPENED[fault.kind](ctx)


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


def _large_norm(ctx: Context) -> None:
    """The norm counts what all ranks have as if it were divided over them."""
    update: Any = ctx.engine._weight_update  # type: ignore[attr-defined]
    plain = update.norm
    update.norm = lambda groups, device: plain(groups, device) * ctx.world_size**0.5


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
        if fault.kind == "by_gas":
            shard.tensor.mul_(ctx.batch.gas)
        if shard.name == fault.name and fault.kind in ONE | GRADIENT:
            (ONE | GRADIENT)[fault.kind](ctx, shard, local[shard.name], gradients.step)
    if fault.kind == "swapped_gradients":
        _swap_gradients({shard.name: shard.tensor for shard in gradients.shards})
    for rows in local.values():
        rows.clear()


def _swap_gradients(shards: dict[str, Tensor]) -> None:
    """Two parameters of one shape get each other's gradient."""
    first, second = shards["blocks.1.up.weight"], shards["blocks.2.up.weight"]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def _drop_last(shard: GradientShard, rows: list[Tensor], parts: int) -> None:
    """The gradient lacks the last micro-batch."""
    last = rows[-1].clone()
    comm.all_reduce(last)
    shard.tensor.sub_(shard.take(last / parts))


def _contribution(shard: GradientShard, rows: list[Tensor], micro: int, parts: int) -> Tensor:
    """What a micro-batch gives to the shard."""
    values = rows[micro].clone()
    comm.all_reduce(values)
    return shard.take(values / parts)


def _stale(shard: GradientShard, kept: list[Tensor]) -> None:
    """The gradient of the step before stands where this step's should."""
    kept.append(shard.tensor.clone())
    if len(kept) > 1:
        shard.tensor.copy_(kept[-2])


def _first_half(shard: GradientShard) -> Tensor:
    return shard.tensor.view(-1)[: shard.tensor.numel() // 2]


BEFORE: StashKey[list[Tensor]] = StashKey("gradients of earlier steps")


def _once_more(
    ctx: Context, shard: GradientShard, rows: list[Tensor], micro: int, times: float
) -> None:
    shard.tensor.add_(_contribution(shard, rows, micro, ctx.mesh.size("dp")), alpha=times)


def _kept(ctx: Context) -> list[Tensor]:
    if ctx.stash.get(BEFORE) is None:
        ctx.stash[BEFORE] = []
    return ctx.stash[BEFORE]


def _of_rank_0(shard: GradientShard, rows: list[Tensor]) -> None:
    values = torch.stack(rows).sum(0)
    comm.broadcast(values, src=0)
    shard.tensor.copy_(shard.take(values))


ONE: dict[str, Callable[[Context, GradientShard, list[Tensor], int], object]] = {
    "not_reduced": lambda ctx, shard, rows, step: shard.tensor.copy_(
        shard.take(sum(rows, torch.zeros(())))
    ),
    "zero": lambda ctx, shard, rows, step: shard.tensor.zero_(),
    "once": lambda ctx, shard, rows, step: shard.tensor.zero_() if step == 0 else None,
    "bfloat16": lambda ctx, shard, rows, step: shard.tensor.copy_(shard.tensor.bfloat16()),
    "float16": lambda ctx, shard, rows, step: shard.tensor.copy_(shard.tensor.half()),
    "half_reduced": lambda ctx, shard, rows, step: _first_half(shard).mul_(0.5),
    "row_lost": lambda ctx, shard, rows, step: shard.tensor.view(-1)[-3:].zero_(),
    "negative": lambda ctx, shard, rows, step: shard.tensor.neg_(),
    "not_a_number": lambda ctx, shard, rows, step: shard.tensor.view(-1)[:1].fill_(float("nan")),
    "rolled": lambda ctx, shard, rows, step: shard.tensor.copy_(
        shard.tensor.view(-1).roll(1).view(shard.tensor.shape)
    ),
    "first_micro": lambda ctx, shard, rows, step: _once_more(ctx, shard, rows, 0, -1.0),
    "twice_micro": lambda ctx, shard, rows, step: _once_more(ctx, shard, rows, 1, 1.0),
    "other_step": lambda ctx, shard, rows, step: _stale(shard, _kept(ctx)),
    "rank_0": lambda ctx, shard, rows, step: _of_rank_0(shard, rows),
}
"""What is done to the reduced gradient of one parameter."""
