"""Schedule-free AdamW (Defazio et al. 2024, https://arxiv.org/abs/2405.15682, algorithm 1).

It keeps three points: z, which AdamW moves; x, the average of all z, which is the result; and y,
between the two, where gradients are taken. Parameters are y throughout, in checkpoints too, so that
a run that is resumed is the same bit for bit. x is worked out from y and z where it is asked for:
`averaged`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from ds_access.states import locate
from ds_access.unshard import put_together
from torch import Tensor

from ds_core.errors import UsageError
from ds_optimizers.base import KernelOptimizer, StepBatch, check_common
from ds_optimizers.collecting import wide

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard
    from ds_optimizer_kit import Layout

    from ds_core.engine import RunningEngine
    from ds_core.partition import StepInputs


class ScheduleFreeAdamW(KernelOptimizer):
    """z -= lr_t * (g / (√v + eps) + wd * y); x += c * (z - x); y = (1 - β1) z + β1 x.

    lr_t = lr * √(1 - β2^t) * min(1, t / warmup_steps), and c is the share of lr_t^2 in the sum of
    all so far. No decay of the learning rate is needed.

    betas: β1 > 0.

    States ``z``, ``exp_avg_sq`` and ``lr_square_sum`` (one value per parameter).
    """

    op: ClassVar[str] = "adam"
    states: ClassVar[tuple[str, ...]] = ("z", "exp_avg_sq")
    counts: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        if betas[0] == 0 or warmup_steps < 0:
            raise ValueError(
                f"betas {tuple(betas)}, warmup_steps {warmup_steps}: β1 > 0, steps >= 0"
            )
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "warmup_steps": warmup_steps})

    def _find_anew(self) -> None:
        super()._find_anew()
        # Whether parameters are x now, see `averaged`.
        self.showing_average = False

    def begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `KernelOptimizer.begin`: x, y and z begin at the same point."""
        states = super().begin(param, group)
        states["z"].copy_(param)
        return {**states, "lr_square_sum": torch.zeros((), dtype=torch.float64)}

    def bind_layout(self, layout: Layout) -> None:
        """Nothing to collect; but what has this is given no part of a tensor with states of zero, as
        ZenFlow gives its columns: z does not begin there.
        """

    def _update_all(self, sizes: Iterator[int], inputs: StepInputs) -> None:
        if self.showing_average:
            raise UsageError(
                "ScheduleFreeAdamW: step within averaged(), where weights are x, not y"
            )
        super()._update_all(sizes, inputs)

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        beta1, beta2 = group["betas"]
        warm = min(1.0, batch.step / max(group["warmup_steps"], 1))
        lr = group["lr"] * (1 - beta2**batch.step) ** 0.5 * warm
        for i, owner in enumerate(batch.owners):
            y = batch.params[i]
            z, square = (states[i] for states in batch.states)
            total = self.state[owner]["lr_square_sum"]
            total += lr**2
            share = lr**2 / float(total) if lr else 0.0
            grad = wide(batch.grads[i]).to(wide(y).dtype) * batch.scale
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            change = grad.div_(square.sqrt().add_(group["eps"]))
            change.add_(wide(y), alpha=group["weight_decay"])
            # What y becomes by x = (y - (1 - beta1) z) / beta1, with no need to store x.
            new = wide(y).lerp(wide(z), share)
            y.copy_(new.add_(change, alpha=lr * (beta1 * (1 - share) - 1)))
            z.sub_(change, alpha=lr)
            if batch.copies is not None:
                batch.copies[i].copy_(y)

    def average(self, param: Tensor, values: Tensor, z: Tensor) -> Tensor:
        """x of a parameter.

        values: y, as `param` has it, flat or in its shape; z: the state, likewise.
        """
        beta1 = next(
            g["betas"][0] for g in self.param_groups if any(p is param for p in g["params"])
        )
        return torch.lerp(wide(values), wide(z).to(wide(values)), 1 - 1 / beta1)


@contextlib.contextmanager
def averaged(engine: RunningEngine) -> Iterator[None]:
    """The averages x are the weights inside: to evaluate, or to save the model. Collective.

    Afterwards weights are y again, the same bits. A checkpoint to go on from is saved outside.

    Raises UsageError for an engine whose optimizer is another one.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, ScheduleFreeAdamW):
        raise UsageError(f"averaged() is for ScheduleFreeAdamW, not {type(optimizer).__name__}")
    found = [locate(engine, param) for param in engine.ctx.trained]
    shards = [shard for shard in found if shard is not None]
    kept: dict[Tensor, Tensor] = {
        shard.updated: shard.read(shard.updated).clone() for shard in shards
    }
    averages: dict[Tensor, Tensor] = {}
    for shard in shards:
        state: Mapping[str, Any] = optimizer.state.get(shard.updated, {})
        if "z" in state:
            y = kept[shard.updated]
            averages[shard.updated] = optimizer.average(shard.updated, y, shard.read(state["z"]))
    _set(shards, {**kept, **averages})
    optimizer.showing_average = True
    try:
        yield
    finally:
        optimizer.showing_average = False
        _set(shards, kept)


@torch.no_grad()
def _set(shards: list[ParamShard], values: Mapping[Tensor, Tensor]) -> None:
    for shard in shards:
        shard.write(shard.updated, values[shard.updated].to(shard.updated.dtype))
        # A graph that has used the old weight can no longer go backward, and says so.
        torch.autograd.graph.increment_version(shard.param)
        piece = shard.read(shard.updated).reshape(-1)
        shard.set_weight(put_together([shard], [piece], [shard.updated_ranges])[0])
