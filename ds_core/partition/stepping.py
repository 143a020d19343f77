"""The optimizer step: norm, plugins that change gradients, clip, update, publish; and what an
optimizer is given.

Gradients arrive in 16 bits, are to be multiplied by one factor (unscaling and clipping), and the
new masters are to be written as 16-bit weights. An optimizer that can do all of it while it updates
says so (`takes_inputs`) and gets `StepInputs`. For any other, torch's too, `Stepper` casts and
multiplies before its ``step()``, and writes the weights after it. Both give the same numbers but
for the kernels' own rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_core.gradients import REDUCE
from ds_core.partition.params import GradNorm, squared_norm
from ds_core.partition.partitioner import Partitioner

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.engine import RunningEngine


class WeightUpdate:
    """One engine's optimizer steps."""

    norm: GradNorm
    """Of gradients that are sharded in any way."""

    def __init__(self, engine: RunningEngine) -> None:
        ctx = engine.ctx
        groups = engine.param_groups()
        self._clip = ctx.config.core.gradient_clipping
        self._schedule_needs = (
            required(engine.lr_scheduler.step) if engine.lr_scheduler is not None else ()
        )
        # Parameters that are added later would be updated, but neither reduced nor clipped.
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
                "parameters were added to the optimizer after initialize, which neither reduces "
                "nor clips them; give all groups to initialize (frozen parameters may be unfrozen later)"
            )
        if missing := [n for n in self._schedule_needs if n not in lr_kwargs]:
            raise UsageError(
                f"the schedule's step needs {', '.join(missing)}; give it with "
                f"engine.step(lr_kwargs={{{missing[0]!r}: ...}})"
            )

    def __call__(self, engine: RunningEngine) -> tuple[float, bool]:
        """Update the weights from gradients that all micro-batches have contributed to, and drop
        them. Collective.

        Returns their global L2 norm, unscaled and before clipping, and whether the weights were
        updated.
        """
        partitioner = engine.partitioner
        scaler = engine.scaler
        # Reduce gradients that no backward has reduced; usually there are none.
        partitioner.finish(REDUCE)
        # The norm is taken before unscaling, so that gradients are read once and written never:
        # the optimizer multiplies by one factor as it reads them.
        unscale = partitioner.gradient_hooks.unscaling()
        raw = self._norm(engine, unscale)
        norm = raw * unscale
        # All ranks have the same norm, so they decide the same without communicating.
        overflow = not math.isfinite(raw)
        applied = (
            not (overflow and engine.ctx.precision.skip_nonfinite) and engine.optimizer is not None
        )
        if overflow:
            engine.telemetry.nonfinite(engine)
        if applied:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6, so that both clip by the same
            # factor.
            clip = self._clip / (norm + 1e-6) if self._clip and not overflow else 1.0
            partitioner.step(engine.optimizer, unscale * min(1.0, clip))  # type: ignore[arg-type]
            partitioner.publish()
        partitioner.zero_grad()
        if scaler is not None:
            scaler.update(overflow)
        return norm, applied

    def _norm(self, engine: RunningEngine, factor: float) -> float:
        """The norm of what the optimizer gets, scaled; plugins have changed the gradients where
        they are finite.
        """
        groups = engine.partitioner.gradients()
        device = engine.ctx.accelerator.current_device()
        norm = self.norm(groups, device)
        if not self._changes_gradients or not math.isfinite(norm):
            return norm
        # Plugins change the same tensors that `groups` holds, so their norm is taken again.
        shards = tuple(engine.partitioner.gradient_shards())
        from ds_core.gradients import Gradients

        gradients = Gradients(
            engine.ctx, shards, factor=factor, norm=norm * factor, step=engine.global_steps
        )
        with torch.no_grad():
            engine.ctx.plugins.ask("ds_gradients", ctx=engine.ctx, gradients=gradients)
        return self.norm(groups, device)


def _takes_gradients(engine: RunningEngine) -> bool:
    """Whether any plugin implements `ds_gradients`.

    Raises UsageError where the partitioner cannot serve it.
    """
    takers = engine.ctx.plugins.implementing("ds_gradients")
    kind = type(engine.partitioner)
    if takers and kind.gradient_shards is Partitioner.gradient_shards:
        raise UsageError(
            f"plugin {takers[0]} changes reduced gradients (ds_gradients), which {kind.__name__} "
            "does not give: the optimizer reduces gradients by itself, or the partitioner has no "
            "gradient_shards"
        )
    return bool(takers)


def required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that `function` cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in named
    )


# -- from gradients to weights ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What ``optimizer.step(inputs=...)`` is given.

    Lists are in the order of the parameters of all groups.
    """

    scale: float = 1.0
    """Gradients are multiplied by it as they are read."""
    grads: Sequence[Tensor | None] | None = None
    """Of the parameters' shapes, in the dtypes in which they arrived; None for a parameter that has
    none. The list itself None: in ``.grad``."""
    copies: Sequence[Tensor | None] | None = None
    """They get the new values, cast to their dtypes, in the parameters' shapes; None for a parameter
    that has none. The list itself None: none has."""


class Stepper:
    """Carries out `Partitioner.step` for tensors that are in memory.

    masters: what the optimizer updates.
    copies: for each master, where the new value is written in another dtype (the weight of which
        this is the master), of the same shape; None: nowhere.
    every: whether copies are written of masters without a gradient too, since an optimizer that
        accepts no inputs may have changed them.
    """

    def __init__(
        self, masters: Sequence[Tensor], copies: Sequence[Tensor | None], *, every: bool = True
    ) -> None:
        self.masters = list(masters)
        self._every = every
        self._copies = list(copies)
        self._any_copy = any(c is not None for c in copies)
        # Place of a master -> the buffer in which its gradient is cast.
        self._cast: dict[int, Tensor] = {}
        # The optimizer's parameters when `_places` was worked out.
        self._order: list[Tensor] = []
        self._places: list[int | None] = []

    def step(self, optimizer: Any, grads: Sequence[Tensor | None] | None, factor: float) -> None:
        """Update masters from `grads` times `factor`, and write their copies.

        grads: one per master, of its shape and of any floating dtype; it may be overwritten. None
        at a place: that master is left as it is. None altogether: each master has its own, in its
        dtype, in ``.grad``.
        """
        if not getattr(optimizer, "takes_inputs", False):
            self._step_plainly(optimizer, grads, factor)
            return
        if grads is None and not self._any_copy:
            inputs = StepInputs(factor)
        else:
            places = self._places_in(optimizer)
            given = grads if grads is not None else [m.grad for m in self.masters]
            copies = (
                [None if i is None else self._copies[i] for i in places] if self._any_copy else None
            )
            inputs = StepInputs(factor, [None if i is None else given[i] for i in places], copies)
        optimizer.step(inputs=inputs)

    def _places_in(self, optimizer: Optimizer) -> list[int | None]:
        """Where each parameter of the optimizer stands among the masters."""
        order = [p for g in optimizer.param_groups for p in g["params"]]
        # By identity: comparing tensors with == would compare their elements.
        if len(order) != len(self._order) or not all(map(is_, order, self._order)):
            known = {id(m): i for i, m in enumerate(self.masters)}
            self._order = order
            self._places = [known.get(id(p)) for p in order]
        return self._places

    def _step_plainly(
        self, optimizer: Any, grads: Sequence[Tensor | None] | None, factor: float
    ) -> None:
        """For an optimizer that knows of ``.grad`` in its tensors' dtype alone."""
        if grads is not None:
            self._give(grads)
        if factor != 1.0 and (given := [m.grad for m in self.masters if m.grad is not None]):
            torch._foreach_mul_(given, factor)
        optimizer.step()
        if self._any_copy:
            self._write_copies()

    @torch.no_grad()
    def _write_copies(self) -> None:
        pairs = [(c, m) for c, m in zip(self._copies, self.masters, strict=True) if c is not None]
        pairs = [(c, m) for c, m in pairs if self._every or m.grad is not None]
        # One call for all: on most devices that is one kernel instead of one per parameter.
        if pairs:
            torch._foreach_copy_([c for c, _ in pairs], [m for _, m in pairs])

    @torch.no_grad()
    def _give(self, grads: Sequence[Tensor | None]) -> None:
        """Set every master's ``.grad``, in buffers that live until `release` where it must be
        cast."""
        cast = []
        arrived = []
        for place, (master, grad) in enumerate(zip(self.masters, grads, strict=True)):
            if grad is None or grad.dtype == master.dtype:
                master.grad = grad
                continue
            if place not in self._cast:
                self._cast[place] = torch.empty_like(master)
            master.grad = self._cast[place]
            cast.append(master.grad)
            arrived.append(grad)
        if cast:
            torch._foreach_copy_(cast, arrived)

    def release(self) -> None:
        """Give back the memory for gradients that were cast; the next step that needs it takes new
        memory.
        """
        self._cast.clear()
