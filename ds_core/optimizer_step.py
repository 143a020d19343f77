"""One optimizer step at the accumulation boundary: norm, plugins that change gradients, clip, update, publish."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ds_core.errors import UsageError
from ds_core.params import GradNorm, squared_norm
from ds_core.partition import Partitioner

if TYPE_CHECKING:
    from ds_core.running import RunningEngine

__all__ = ["OptimizerStep", "required"]


class OptimizerStep:
    """What one engine's optimizer steps have in common. norm: of gradients that are sharded in any way."""

    def __init__(self, engine: RunningEngine) -> None:
        ctx, groups = engine.ctx, engine.param_groups()
        self._clip = ctx.config.core.gradient_clipping
        self._sum = ctx.mesh.size("dp") if ctx.config.core.gradient_allreduce_op == "sum" else 1
        self._schedule_needs = required(engine.lr_scheduler.step) if engine.lr_scheduler is not None else ()
        self._num_params = sum(len(g["params"]) for g in groups)
        self._changes_gradients = _takes_gradients(engine)
        self.norm = GradNorm(
            ctx.mesh,
            engine.partitioner.axes(),
            lambda device, dtype: ctx.kernels.get(
                "squared_norm", device, str(dtype).removeprefix("torch."), squared_norm
            ),
            like=[p for g in groups for p in g["params"]],
        )

    def check(self, engine: RunningEngine, lr_kwargs: Mapping[str, Any]) -> None:
        """Raise UsageError for what would go wrong in the middle of the step."""
        if sum(len(g["params"]) for g in engine.param_groups()) != self._num_params:
            raise UsageError(
                "parameters were added to the optimizer after initialize, which neither reduces nor clips "
                "them; give all groups to initialize (frozen parameters may be unfrozen later)"
            )
        if missing := [n for n in self._schedule_needs if n not in lr_kwargs]:
            raise UsageError(
                f"the schedule's step needs {', '.join(missing)}; give it with "
                f"engine.step(lr_kwargs={{{missing[0]!r}: ...}})"
            )

    def __call__(self, engine: RunningEngine) -> tuple[float, bool]:
        """Update the weights from gradients that all micro-batches have contributed to, and drop them. Collective.

        Returns their global L2 norm, unscaled and before clipping, and whether the weights were updated.
        """
        partitioner, scaler = engine.partitioner, engine.scaler
        partitioner.sync = True
        partitioner.finish()
        unscale = self._sum / engine.loss_scale / partitioner.gradient_hooks.window.divisor
        raw = self._norm(engine, unscale)
        norm, overflow = raw * unscale, not math.isfinite(raw)
        applied = not (overflow and engine.ctx.precision.skip_nonfinite) and engine.optimizer is not None
        if overflow:
            engine.telemetry.nonfinite(engine)
        if applied:
            clip = self._clip / (norm + 1e-6) if self._clip and not overflow else 1.0
            partitioner.step(engine.optimizer, unscale * min(1.0, clip))  # type: ignore[arg-type]
            partitioner.publish()
        partitioner.zero_grad()
        if scaler is not None:
            scaler.update(overflow)
        return norm, applied

    def _norm(self, engine: RunningEngine, factor: float) -> float:
        """The norm of what the optimizer gets, scaled; plugins have changed the gradients where they are finite."""
        groups, device = engine.partitioner.gradients(), engine.ctx.accelerator.current_device()
        norm = self.norm(groups, device)
        if not self._changes_gradients or not math.isfinite(norm):
            return norm
        shards = tuple(engine.partitioner.gradient_shards())
        from ds_core.gradients import Gradients

        gradients = Gradients(engine.ctx, shards, factor=factor, norm=norm * factor, step=engine.global_steps)
        with torch.no_grad():
            engine.ctx.plugins.ask("ds_gradients", ctx=engine.ctx, gradients=gradients)
        return self.norm(groups, device)


def _takes_gradients(engine: RunningEngine) -> bool:
    """Whether any plugin implements `ds_gradients`. Raises UsageError where the partitioner cannot serve it."""
    takers, kind = engine.ctx.plugins.implementing("ds_gradients"), type(engine.partitioner)
    if takers and kind.gradient_shards is Partitioner.gradient_shards:
        raise UsageError(
            f"plugin {takers[0]} changes reduced gradients (ds_gradients), which {kind.__name__} does not give: the "
            "optimizer reduces gradients by itself, or the partitioner has no gradient_shards"
        )
    return bool(takers)


def required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that `function` cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in named)
