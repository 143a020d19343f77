"""More planted faults, by where they act; `faults` is the plugin that has them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import GradientShard

# -- in the model: what a module gives, or passes back ---------------------------------------------


def _changed(name: str, change: Callable[[Tensor], Tensor], model: nn.Module) -> nn.Module:
    """The output of the module `name` becomes what `change` makes of it."""
    module: Any = model.get_submodule(name)
    plain = module.forward
    module.forward = lambda *inputs: change(plain(*inputs))
    return model


class _Scaled(torch.autograd.Function):
    """The value itself, and twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def _shifted(model: nn.Module) -> nn.Module:
    """Tokens are looked up by another number, as with a vocabulary that is cut wrongly."""
    tok: Any = model.get_submodule("tok")
    plain = tok.forward
    tok.forward = lambda x: plain((x + 1) % tok.num_embeddings)
    return model


def _without_affine(model: nn.Module) -> nn.Module:
    """A norm computes with the weight and bias that it began with."""
    norm: Any = model.get_submodule("blocks.1.norm")
    norm.forward = lambda x: (
        nn.functional.layer_norm(x, norm.normalized_shape) + 0 * (norm.weight + norm.bias)
    )
    return model


def _twice_counted(model: nn.Module) -> nn.Module:
    """A module that is used twice gives its gradient twice for each use."""
    shared: Any = model.get_submodule("shared")
    shared.weight.register_hook(lambda grad: 2 * grad)
    return model


def _noisy_weight(model: nn.Module) -> nn.Module:
    """A layer computes with a weight that was gathered with an error."""
    up: Any = model.get_submodule("blocks.1.up")
    up.forward = lambda x: nn.functional.linear(x, up.weight * 1.01, up.bias)
    return model


def _half_norm(model: nn.Module) -> nn.Module:
    """A norm computes in fp16."""
    norm: Any = model.get_submodule("blocks.1.norm")
    norm.forward = lambda x: nn.functional.layer_norm(
        x.half().to(x.dtype), norm.normalized_shape, norm.weight, norm.bias
    )
    return model


MODEL: dict[str, Callable[[nn.Module], nn.Module]] = {
    "permuted": partial(_changed, "blocks.1.up", lambda x: x.roll(1, -1)),
    "head_scaled": partial(_changed, "head", lambda x: 1.001 * x),
    "clamped": partial(_changed, "blocks.1", lambda x: x.clamp(-0.5, 0.5)),
    "shifted_time": partial(_changed, "shared", lambda x: x.roll(1, 1)),
    "mixed_samples": partial(_changed, "shared", lambda x: x.roll(1, 0)),
    "scaled_backward": partial(_changed, "blocks.1", _Scaled.apply),
    "embedding_detached": partial(_changed, "tok", lambda x: x.detach()),
    "shifted": _shifted,
    "without_affine": _without_affine,
    "twice_counted": _twice_counted,
    "noisy_weight": _noisy_weight,
    "half_norm": _half_norm,
}

# -- on the reduced gradient of one parameter ------------------------------------------------------


def _largest(shard: GradientShard, rows: list[Tensor]) -> None:
    """Ranks take the largest of their gradients instead of the sum."""
    values = torch.stack(rows).sum(0)
    comm.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
    shard.tensor.copy_(shard.take(values))


def _in_8_bits(shard: GradientShard) -> None:
    """A wire of 8 bits with one scale, where none was asked for."""
    scale = shard.tensor.abs().max() / 127
    shard.tensor.copy_((shard.tensor / scale).round() * scale)


def _signs(shard: GradientShard) -> None:
    """One bit per element, and what that loses is not fed back."""
    shard.tensor.copy_(shard.tensor.sign() * shard.tensor.abs().mean())


def _rank_1_twice(ctx: Context, shard: GradientShard, rows: list[Tensor]) -> None:
    """The contribution of rank 1 counts twice."""
    values = torch.stack(rows).sum(0)
    comm.broadcast(values, src=1)
    shard.tensor.add_(shard.take(values / ctx.mesh.size("dp")))


def _overwritten(ctx: Context, shard: GradientShard, rows: list[Tensor]) -> None:
    """The first micro-batch stands where the last should."""
    change = rows[0] - rows[-1]
    comm.all_reduce(change)
    shard.tensor.add_(shard.take(change / ctx.mesh.size("dp")))


def _transposed(shard: GradientShard) -> None:
    """The gradient of a square part has rows and columns exchanged."""
    flat = shard.tensor.view(-1)
    square = flat[:64].view(8, 8)
    square.copy_(square.t().clone())


Rows = list[Tensor]
GRADIENT: dict[str, Callable[[Any, Any, Rows, int], object]] = {
    "scaled_slightly": lambda ctx, shard, rows, step: shard.tensor.mul_(1.02),
    "by_both": lambda ctx, shard, rows, step: shard.tensor.div_(ctx.world_size * ctx.batch.gas),
    "largest": lambda ctx, shard, rows, step: _largest(shard, rows),
    "in_8_bits": lambda ctx, shard, rows, step: _in_8_bits(shard),
    "signs": lambda ctx, shard, rows, step: _signs(shard),
    "rank_1_twice": lambda ctx, shard, rows, step: _rank_1_twice(ctx, shard, rows),
    "overwritten": lambda ctx, shard, rows, step: _overwritten(ctx, shard, rows),
    "transposed": lambda ctx, shard, rows, step: _transposed(shard),
    "infinite": lambda ctx, shard, rows, step: shard.tensor.view(-1)[:1].fill_(torch.inf),
}

# -- of the norm and the update --------------------------------------------------------------------


def _norm_without(ctx: Context) -> None:
    """The norm leaves the first tensor out."""
    update: Any = ctx.engine._weight_update  # type: ignore[attr-defined]
    plain = update.norm

    def norm(groups: Any, device: Any) -> float:
        kept = [group.tensors.pop(0) for group in groups if group.tensors]
        found: float = plain(groups, device)
        for group, tensor in zip((g for g in groups), kept, strict=False):
            group.tensors.insert(0, tensor)
        return found

    update.norm = norm


def _norm_squared(ctx: Context) -> None:
    """The root of the sum of squares is not taken."""
    update: Any = ctx.engine._weight_update  # type: ignore[attr-defined]
    plain = update.norm
    update.norm = lambda groups, device: plain(groups, device) ** 2


def _computes_with(key: str, value: Any, ctx: Context) -> None:
    """The update has another hyperparameter than its group, as a kernel with a wrong argument."""
    optimizer: Any = ctx.engine.optimizer
    plain = optimizer.step

    def step(*args: Any, **more: Any) -> Any:
        kept = [group[key] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group[key] = value
        try:
            return plain(*args, **more)
        finally:
            for group, before in zip(optimizer.param_groups, kept, strict=True):
                group[key] = before

    optimizer.step = step


def _two_steps(ctx: Context) -> None:
    """The optimizer updates twice with one gradient."""
    optimizer: Any = ctx.engine.optimizer
    plain = optimizer.step

    def step(*args: Any, **more: Any) -> Any:
        plain(*args, **more)
        return plain(*args, **more)

    optimizer.step = step


def _lost_states(ctx: Context) -> None:
    """First moments are zero before each update."""
    optimizer: Any = ctx.engine.optimizer
    plain = optimizer.step

    def step(*args: Any, **more: Any) -> Any:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        return plain(*args, **more)

    optimizer.step = step


def _rounded(ctx: Context) -> None:
    """New weights are sent in bf16."""
    publish = ctx.engine.partitioner.publish

    def publishing() -> None:
        publish()
        for param in ctx.trained:
            param.data.copy_(param.data.bfloat16())

    ctx.engine.partitioner.publish = publishing  # type: ignore[method-assign]


OPENED: dict[str, Callable[[Context], None]] = {
    "norm_without": _norm_without,
    "norm_squared": _norm_squared,
    "decay": partial(_computes_with, "weight_decay", 0.5),
    "betas": partial(_computes_with, "betas", (0.5, 0.9)),
    "large_eps": partial(_computes_with, "eps", 1e-2),
    "two_steps": _two_steps,
    "lost_states": _lost_states,
    "rounded": _rounded,
}
