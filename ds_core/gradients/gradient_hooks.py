"""Hooks on the parameters of one engine, and whose backward each gradient comes from.

`GradientHooks` calls `Partitioner.begin` before, `on_gradient` during and `finish` after every
backward that reaches the engine's parameters: its own ``backward``, a plain ``loss.backward()``,
and another engine's ``backward`` of a loss that both contributed to. So a partitioner need not know
which one runs. No hook is installed where none is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.gradients.accumulation import LATER, Accumulation, BackwardPlan, Origin, Window
from ds_core.process import STATE, log_once

if TYPE_CHECKING:
    from torch import nn

    from ds_core.engine import RunningEngine
    from ds_core.gradients.multi_engine import JointBackwards
    from ds_core.partition import Partitioner

log = logging.getLogger("ds_core.engine")


Phase = Callable[[str], contextlib.AbstractContextManager[None]]


class GradientHooks:
    """The gradients of one engine. A partitioner has it as `Partitioner.gradient_hooks`."""

    # -- whose gradients
    module: nn.Module
    """The model, as it is trained."""
    partitioner: Partitioner
    """Gets the gradients."""
    engine: weakref.ref[RunningEngine]
    """Weak, since hooks on a model may outlive a forgotten engine."""
    serial: int
    """Numbers the engines of the process, equally on all ranks."""

    # -- where they come from
    window: Window
    """Where the gradients since the last update came from."""
    origin: Origin = Origin.NONE
    """Whose backward gives gradients now."""
    joint: JointBackwards | None = None
    """Backwards through several engines; None while there is one engine."""

    # -- what becomes of them
    accumulation: Accumulation
    """Plans backwards; set by itself."""
    plan: BackwardPlan = LATER
    """Of the backward that runs, or ran last."""

    def __init__(self, engine: RunningEngine) -> None:
        self._ctx = engine.ctx
        self.module = engine.module
        self.partitioner = engine.partitioner
        self.engine = weakref.ref(engine)
        self.window = Window(engine.ctx.batch.gas)
        # In a backward that the engine did not start, and after which `leave` will be called.
        self._entered = False
        self._handles: list[Any] = []
        # An engine that is dropped takes its hooks along.
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        # A flag of its own: if all parameters are frozen, hooks are installed and `_handles` is
        # empty.
        self._installed = False
        # By parameter, as it was when hooks were installed: frozen ones cannot have one.
        self._trainable: list[bool] = []
        # Whether the plan of the next backward is marked as changed.
        self._changed = True
        engine.partitioner.gradient_hooks = self
        self.serial = STATE.enter(self)
        if len(STATE.present()) > 1:
            # The engines before this one need hooks too: they may now take part in its backward.
            from ds_core.gradients.multi_engine import JOINT

            JOINT.enter(engine.ctx)
        else:
            self.install()

    def close(self) -> None:
        """The engine ends: remove all hooks."""
        STATE.members.pop(self.serial, None)
        self.remove()
        if self.joint is not None:
            self.joint.leave()

    def install(self) -> None:
        """Install the hooks that are needed now; called again when accumulation steps or live
        engines changed.
        """
        self.remove()
        trained = self._ctx.trained
        before, self._trainable = self._trainable, [p.requires_grad for p in trained]
        self._changed |= self._trainable != before
        self._installed = self.partitioner.takes_gradients or self._origin_matters()
        if self._installed:
            # Not a bound method: the garbage collector does not see what a parameter's hook refers
            # to, so an engine that is dropped without `destroy` would never be freed.
            ref: Any = weakref.ref(self)
            self._handles += [
                p.register_post_accumulate_grad_hook(lambda p: ref()._on_gradient(p))
                for p in trained
                if p.requires_grad
            ]

    def remove(self) -> None:
        """Remove all hooks."""
        _remove_all(self._handles)
        self._installed = False

    def _origin_matters(self) -> bool:
        """Whether it must be known which gradients came from another backward than the engine's
        own.

        They differ by a factor, or (without managed accumulation) backwards are counted.
        """
        ctx = self._ctx
        counted = not ctx.config.core.managed_gradient_accumulation
        others = (
            h for h in STATE.present() if h is not None and h is not self and h.engine() is not None
        )
        return ctx.batch.gas > 1 or ctx.precision.scaler is not None or counted or any(others)

    @property
    def unfinished(self) -> bool:
        """Whether there are gradients, or micro-batches, that no update has used yet."""
        # Where no hook is needed, a plain ``loss.backward()`` is seen by its gradients alone.
        return self.window.open or any(p.grad is not None for p in self._ctx.trained)

    def unscaling(self) -> float:
        """What the step multiplies gradients by, before it clips: it undoes the loss scale and the
        accumulation.
        """
        ctx = self._ctx
        engine = self.engine()
        total = ctx.mesh.size("batch") if ctx.config.core.gradient_allreduce_op == "sum" else 1
        return total / (engine.loss_scale if engine is not None else 1.0) / self.window.divisor

    # -- backwards ---------------------------------------------------------------------------------

    def run(
        self,
        backward: Callable[[], object],
        factor: float,
        phase: Phase | None = None,
        *,
        plan: BackwardPlan | None = None,
        alike: bool = True,
    ) -> None:
        """Run `backward`, of a loss that this engine has scaled, and complete the reductions that
        are due.

        factor: what the engine multiplies losses by; other engines whose parameters the loss comes
            through receive it.
        phase: times the phases "backward", "backward_inner" and "backward_allreduce".
        plan: a runner's, which knows its batch; None: the accumulation's.
        alike: all ranks run it now; else they call `finish_joint` later, together.
        """
        outer, self.origin = self.origin, Origin.ENGINE
        joint = self.joint
        outer_driver = None
        if joint is not None:
            outer_driver, joint.driver = joint.driver, (self, factor)
        try:
            if phase is None:
                self.begin(plan)
                backward()
                self._finish(alike)
                return
            with phase("backward"):
                self.begin(plan)
                with phase("backward_inner"):
                    backward()
                with phase("backward_allreduce"):
                    self._finish(alike)
        finally:
            self.origin = outer
            if joint is not None:
                joint.driver = outer_driver

    def _finish(self, alike: bool) -> None:
        self.partitioner.finish(self.plan)
        if alike:
            self.finish_joint()

    def finish_joint(self) -> None:
        """Finish the reductions of other engines that this one's backwards came to.

        Collective where there are any.
        """
        if self.joint is not None:
            self.joint.finish(self)

    def _on_gradient(self, param: Tensor) -> None:
        """Runs inside backward each time ``param.grad`` is complete for this backward, or one
        nested in it.
        """
        if self.origin is Origin.NONE:
            self.enter()
            self.note()
        if self.partitioner.takes_gradients:
            self.partitioner.on_gradient(param)  # type: ignore[arg-type]

    def enter(self) -> None:
        """A backward has reached the engine's modules or parameters: if the engine does not run it,
        begin it here.

        For hooks on modules, which see a backward before any gradient is there. Runs inside
        backward.
        """
        if self.origin is Origin.NONE and not self._entered:
            self.begin()
            self._entered = True
            if self.joint is not None:
                self.joint.finish_later(self)
            else:
                torch.autograd.Variable._execution_engine.queue_callback(self.leave)

    def note(self) -> None:
        """The running backward, which the engine did not start, gives it gradients."""
        driver = self.joint.driver if self.joint is not None else None
        self.origin = Origin.PLAIN if driver is None else Origin.JOINT
        self.window.add(self.origin, 1.0 if driver is None else driver[1])

    def begin(self, plan: BackwardPlan | None = None) -> None:
        """Tell the partitioner that a backward begins.

        plan: see `run`.
        """
        if self._installed and self._trainable != [p.requires_grad for p in self._ctx.trained]:
            self.install()
        plan = plan if plan is not None else self.accumulation.plan
        # With several engines, only the one whose `backward` was called may wait for other ranks:
        # those may reach the engines in another order.
        several = self.joint is not None and self.joint.group is not None
        may_wait = not several or self.origin is Origin.ENGINE
        # Nearly all backwards use one of three constant plans, so usually nothing is copied.
        if self._changed or not may_wait:
            plan = dataclasses.replace(plan, changed=self._changed, may_wait=may_wait)
        self.plan = plan
        self._changed = False
        self.partitioner.begin(plan)

    def leave(self) -> None:
        """The backward that was entered is over."""
        self.forget()
        self.partitioner.finish(self.plan)

    def forget(self) -> None:
        """No backward runs, also when the last one failed half-way."""
        self.origin = Origin.NONE
        self._entered = False
        if self.joint is not None:
            self.joint.forget()


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


# -- zero_grad of the optimizer and of the module --------------------------------------------------
# Their own methods only see ``param.grad``, and gradients may lie elsewhere: in buckets, in shards,
# in fp32. torch has no hook for it, so an attribute of the instance stands before the class's
# method until the engine is destroyed. A copy of the module by ``copy.deepcopy`` or pickle belongs
# to no engine, and its `zero_grad` is the class's.


def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    """`zero_grad` of an engine's optimizer or module. Every rank calls it."""
    type(self).zero_grad(self, *args, **kwargs)
    for engine in STATE.engines:
        if engine.optimizer is self or engine.module is self:
            engine.drop_gradients()
            if not (args[0] if args else kwargs.get("set_to_none", True)):
                log_once(
                    log,
                    logging.INFO,
                    "zero_grad(set_to_none=False): gradients are dropped, not filled with 0",
                )


def watch_zero_grad(*owners: Any) -> None:
    """Let ``zero_grad`` of each of `owners`, an engine's optimizer and module, drop the engine's
    gradients.
    """
    for owner in owners:
        if owner is not None:
            owner.__dict__.setdefault("zero_grad", types.MethodType(zero_grad, owner))


def unwatch_zero_grad(*owners: Any) -> None:
    """The reverse of `watch_zero_grad`."""
    for owner in owners:
        method = getattr(owner, "__dict__", {}).get("zero_grad")
        if isinstance(method, types.MethodType) and method.__func__ is zero_grad:
            del owner.__dict__["zero_grad"]
